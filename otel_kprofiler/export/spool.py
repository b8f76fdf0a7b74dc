"""Batches on disk: an append-only log in segments, which survives being cut off at any byte.

Why not an embedded database: of sqlite3 in WAL mode, a main file that was cut anywhere was
unreadable as a whole, deleting cost as much as writing, and two to four times the CPU was
used for the same number of fsyncs. A log needs none of what a database offers.

A segment is ``NUMBER.spool``, named after the first record it may hold; its form is in
:mod:`otel_kprofiler.export.segments`. A process always begins a new segment, so nothing is ever
written behind a damaged record.

- A *batch* record has its number, what was appended before it, and the batch.
- A *mark* says up to which batch everything is settled, and the totals at that time. Each
  segment begins with one, so that older segments may go.
- A *close* is a mark that ends the log in an orderly way.

Counts of samples in every record tell exactly how many are missing when a segment is damaged.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from otel_kprofiler.errors import ExportError
from otel_kprofiler.export.segments import (
    HEADER_BYTES,
    MAGIC,
    Kind,
    Record,
    StoredBatch,
    pack_batch,
    pack_record,
    read_records,
    unpack_batch,
)
from otel_kprofiler.model import Batch, LossCause

SUFFIX: Final = ".spool"
DEFAULT_MAX_BYTES: Final = 1024 * 1024 * 1024
DEFAULT_MAX_AGE_S: Final = 24 * 3600.0

_MOST_SEGMENT_BYTES: Final = 16 * 1024 * 1024
_SEGMENTS: Final = 8
"""Number of segments that the size limit has room for: the oldest one goes as a whole."""

_NAME: Final = re.compile(r"\d{20}\.spool")
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_EARLIEST_S: Final = 1_600_000_000
"""Before this (2020), the clock was not set, and the age of a batch is not known."""

_log = logging.getLogger(__name__)


class Stored(NamedTuple):
    """A batch in the spool.

    Attributes:
        number: of its record; they follow one another.
        samples: in the batch.
        size: bytes of the record.
        since_s: when it was appended, in monotonic seconds.
        segment: number in the name of its segment.
        offset: of its record in the segment.
    """

    number: int
    samples: int
    size: int
    since_s: float
    segment: int
    offset: int


class _State:
    """What marks say: totals of the spool's whole life, in samples."""

    def __init__(self) -> None:
        self.settled = 0  # number of the last batch that needs no delivery any more
        self.done = 0  # samples that were exported or counted as lost
        self.appended = 0  # samples that were ever put in
        self.end_unix_ns = 0  # end of the window that was put in last

    def pack(self) -> bytes:
        return json.dumps(vars(self)).encode()

    def unpack(self, body: bytes) -> None:
        for key, value in json.loads(body).items():
            # A mark of an older segment may be read after newer records were lost.
            setattr(self, key, max(getattr(self, key), int(value)))


class Spool:
    """The spool of one exporter; one process at a time may have it open. Thread-safe.

    Args:
        directory: made if missing, readable by its owner only.
        max_bytes: size of all segments; above it the oldest segment goes.
        max_age_s: batches that were put in longer ago are given up; 0 means never.
        fsync: wait for the disk after each record. Without it what was written survives the
            end of the process however it comes, but not that of the machine.
        now: seconds of a clock that nobody sets.

    Raises:
        ExportError: the directory is unusable, or another process has it open.

    Attributes:
        waiting: batches of earlier runs that are still to be delivered, oldest first.
        damaged: samples of earlier runs that cannot be read any more.
        unknown_since_unix_ns: when not 0, the run before was killed, and what it had taken
            after this time is unknown.
    """

    def __init__(
        self,
        directory: str,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_age_s: float = DEFAULT_MAX_AGE_S,
        fsync: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._segment_bytes = min(_MOST_SEGMENT_BYTES, max_bytes // _SEGMENTS)
        self._max_age_s = max_age_s
        self._fsync = fsync
        self._now = now
        self._lock = threading.RLock()
        self._state = _State()
        self._sizes: dict[int, int] = {}
        self._fd = -1
        self._segment = 0
        self._last = 0
        self.waiting: deque[Stored] = deque()
        self.damaged = 0
        self.unknown_since_unix_ns = 0
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            self._guard = _lock(directory)
            try:
                self._recover()
                self._begin()
            except BaseException:
                os.close(self._guard)
                raise
        except OSError as error:
            raise ExportError(
                f"the spool {directory} cannot be used: {error.strerror}",
                hint="give a directory on a disk with room that this user can write, or remove"
                " sending_queue.storage",
            ) from error

    def append(self, batch: Batch) -> Stored:
        """Write a batch; when this returns it will be there after a crash.

        Raises:
            OSError: it could not be written; the spool is as before.
        """
        with self._lock:
            self._check_open()
            number = self._last + 1
            body = pack_batch(StoredBatch(number, self._state.appended, time.time_ns(), batch))
            full = self._sizes.get(self._segment, 0) + len(body) > self._segment_bytes
            if self._fd < 0 or (full and self._last >= self._segment):
                self._begin_segment()
            offset = self._write(Kind.BATCH, body)
            self._last = number
            self._state.appended += batch.sample_count
            self._state.end_unix_ns = max(self._state.end_unix_ns, batch.end_unix_ns)
            size = HEADER_BYTES + len(body)
            since = self._now()
            return Stored(number, batch.sample_count, size, since, self._segment, offset)

    def read(self, stored: Stored) -> Batch:
        """A batch as it was put in.

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged.
        """
        with self._lock, open(self._path(stored.segment), "rb", buffering=0) as file:
            file.seek(stored.offset)
            record = next(read_records(file), None)
        if record is None or record.kind != Kind.BATCH:
            raise ValueError(f"the spool is damaged: {self._path(stored.segment)}")
        return unpack_batch(record.body).batch

    def settle(self, number: int, samples: int) -> None:
        """Note that a batch needs no delivery any more, and drop segments of no further use.

        Args:
            number: of the batch; all before it are settled too.
            samples: how many were exported or lost since the last call.

        Raises:
            OSError: it could not be written down; the batch comes again after a crash.
        """
        with self._lock:
            self._check_open()
            self._state.settled = max(self._state.settled, number)
            self._state.done += samples
            try:
                if self._fd < 0:
                    self._begin_segment()
                else:
                    self._write(Kind.MARK, self._state.pack())
            except OSError:
                if self._state.settled < self._last:
                    raise
                # Nothing waits, so that what is on the disk is of no use but takes its room.
                self._end_segment()
                self._drop_settled()
                self._begin_segment()
            finally:
                self._drop_settled()

    def holds(self, stored: Stored) -> bool:
        """Whether a batch has not been settled, or given up by settling one after it."""
        return stored.number > self._state.settled

    def count_overdue(self, waiting: Sequence[Stored], more: int) -> tuple[int, LossCause | None]:
        """How many batches at the head have to give way, and why.

        Args:
            waiting: the batches that wait, oldest first.
            more: bytes that are about to be added.
        """
        if not waiting:
            return 0, None
        oldest = self._now() - self._max_age_s
        if self._max_age_s and waiting[0].since_s < oldest:
            return sum(1 for held in waiting if held.since_s < oldest), LossCause.SPOOL_AGED
        if sum(self._sizes.values()) + more <= self._max_bytes:
            return 0, None
        # A segment that is written to cannot go; a lonely one is ended by the next batch.
        first = waiting[0].segment
        return sum(1 for held in waiting if held.segment == first), LossCause.SPOOL_FULL

    def close(self) -> None:
        """Say that nothing is missing, and let another process have the spool; idempotent."""
        with self._lock:
            if self._guard < 0:
                return
            try:
                if self._fd >= 0:
                    self._write(Kind.CLOSE, self._state.pack())
            except OSError as error:
                _log.warning("%s: cannot be closed in order: %s", self._directory, error)
            self._end_segment()
            os.close(self._guard)
            self._guard = -1

    def _check_open(self) -> None:
        if self._guard < 0:
            raise OSError(errno.EBADF, "the spool is closed")

    def _path(self, segment: int) -> str:
        return os.path.join(self._directory, f"{segment:020}{SUFFIX}")

    def _begin(self) -> None:
        """Begin a segment; on a full disk only later, when something was delivered."""
        try:
            self._begin_segment()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            _log.warning("%s: %s; nothing new is stored yet", self._directory, error.strerror)
            self._drop_settled()

    def _begin_segment(self) -> None:
        self._end_segment()
        # Numbers may be left out, but a name is never used again: its mark may be needed yet.
        segment = max(self._last, *self._sizes, 0) + 1
        path = self._path(segment)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._fd, self._segment, self._sizes[segment] = fd, segment, 0
        try:
            self._write_bytes(MAGIC)
            self._write(Kind.MARK, self._state.pack())
            self._sync_directory()
        except OSError:
            # Without its mark it must not be continued: the next record tries again.
            self._end_segment()
            del self._sizes[segment]
            os.unlink(path)
            raise
        self._last = segment - 1

    def _end_segment(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self, kind: Kind, body: bytes) -> int:
        """Append a record, complete or not at all; returns its offset."""
        return self._write_bytes(pack_record(kind, body))

    def _write_bytes(self, data: bytes) -> int:
        offset = self._sizes[self._segment]
        try:
            if os.pwrite(self._fd, data, offset) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301
            if self._fsync:
                os.fdatasync(self._fd)
        except OSError:
            try:
                os.ftruncate(self._fd, offset)
            except OSError:
                self._end_segment()  # what follows half a record could not be read
            raise
        self._sizes[self._segment] = offset + len(data)
        return offset

    def _sync_directory(self) -> None:
        if self._fsync:
            fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _drop_settled(self) -> None:
        """Remove segments whose batches are all settled, but for the one that is written to."""
        segments = sorted(self._sizes)
        if self._fd < 0:
            segments.append(self._last + 1)
        for segment, following in itertools.pairwise(segments):
            if following > self._state.settled + 1:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(segment))
            del self._sizes[segment]

    def _recover(self) -> None:
        closed, seen = True, False
        found: list[Stored] = []
        names = sorted(filter(_NAME.fullmatch, os.listdir(self._directory)))
        for name in names:
            segment = int(name.removesuffix(SUFFIX))
            path = self._path(segment)
            self._sizes[segment] = os.path.getsize(path)
            self._last = max(self._last, segment - 1)
            end = 0
            with open(path, "rb") as file:
                if file.read(len(MAGIC)) == MAGIC:
                    end = len(MAGIC)
                    for record in read_records(file):
                        end = record.offset + record.size
                        closed, seen = record.kind == Kind.CLOSE, True
                        if record.kind == Kind.BATCH:
                            found.append(self._recovered(record, segment))
                        else:
                            self._state.unpack(record.body)
            if end < self._sizes[segment]:
                closed = False
                _log.warning("%s: %d bytes at the end of %s are unreadable", self._directory,
                             self._sizes[segment] - end, name)  # fmt: skip
        state = self._state
        self.waiting.extend(filter(self.holds, found))
        # Each sample that was put in is done, waits, or is in what cannot be read.
        waiting = sum(stored.samples for stored in self.waiting)
        self.damaged = max(0, state.appended - state.done - waiting)
        state.done += self.damaged
        if seen and not closed:
            self.unknown_since_unix_ns = state.end_unix_ns

    def _recovered(self, record: Record, segment: int) -> Stored:
        """The batch of a record; takes over what it says of the ones before it."""
        number, before, put_unix_ns, batch = unpack_batch(record.body)
        state = self._state
        state.appended = max(state.appended, before + batch.sample_count)
        state.end_unix_ns = max(state.end_unix_ns, batch.end_unix_ns)
        self._last = max(self._last, number)
        put_s = put_unix_ns / 1e9
        age_s = max(0.0, time.time() - put_s) if put_s > _EARLIEST_S else 0.0
        since = self._now() - age_s
        return Stored(number, batch.sample_count, record.size, since, segment, record.offset)


def _lock(directory: str) -> int:
    path = os.path.join(directory, "lock")
    fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ExportError(
            f"the spool {directory} is in use",
            hint="give each agent a storage of its own; where a reload changes what is in"
            " storage, or its limits, restart the agent",
        ) from None
    return fd
