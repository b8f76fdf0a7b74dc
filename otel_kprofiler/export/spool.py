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

What is removed under a spool that is open, down to its directory, is made anew with the next
record. The segment that is written to is complete then; of others it is told when they are read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from otel_kprofiler.errors import ExportError
from otel_kprofiler.export.recovery import Recovery, Stored, has_segments, name_segment
from otel_kprofiler.export.segments import (
    HEADER_BYTES,
    MAGIC,
    Kind,
    StoredBatch,
    Totals,
    pack_batch,
    pack_record,
    parse_record,
    unpack_batch,
)
from otel_kprofiler.host import PrivateDirectory
from otel_kprofiler.model import Batch, LossCause

DEFAULT_MAX_BYTES: Final = 1024 * 1024 * 1024
DEFAULT_MAX_AGE_S: Final = 24 * 3600.0

_MOST_SEGMENT_BYTES: Final = 16 * 1024 * 1024
_SEGMENTS: Final = 8
"""Number of segments that the size limit has room for: the oldest one goes as a whole."""

_PASSING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
"""What may pass without anybody changing the configuration: disks that are full, or failing."""
_LOCK: Final = "lock"

_log = logging.getLogger(__name__)


class Spool:
    """The spool of one exporter; one process at a time may have it open. Thread-safe.

    On a disk that is full or read-only at the start, every :meth:`append` tries to open it, and
    batches of earlier runs may come to light then.

    Args:
        directory: made if missing, readable by its owner only.
        max_bytes: size of all segments; above it the oldest segment goes.
        max_age_s: batches that were put in longer ago are given up; 0 means never.
        fsync: wait for the disk after each record. Without it what was written survives the
            end of the process however it comes, but not that of the machine.
        now: seconds of a clock that nobody sets.

    Raises:
        ExportError: the directory is unusable, others can write it, or another process has it
            open.

    Attributes:
        waiting: batches of earlier runs that are still to be delivered, oldest first.
        damaged: samples of earlier runs that cannot be read any more.
        unknown_since_unix_ns: when not 0, the end of the log is missing: the run before was
            killed, and what it had taken after this time is unknown.
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
        self._path = directory
        self._max_bytes = max_bytes
        self._segment_bytes = min(_MOST_SEGMENT_BYTES, max_bytes // _SEGMENTS)
        self._max_age_s = max_age_s
        self._fsync = fsync
        self._now = now
        self._lock = threading.RLock()
        self._totals = Totals()
        self._sizes: dict[int, int] = {}
        self._directory: PrivateDirectory | None = None
        self._guard = self._fd = -1
        self._segment = 0
        self._last = 0
        self._closed = False
        self.waiting: deque[Stored] = deque()
        self.damaged = 0
        self.unknown_since_unix_ns = 0
        try:
            self._open()
            self._begin_segment()
        except OSError as error:
            if error.errno not in _PASSING:
                self._let_go()
                raise _refusal(directory, error) from error
            _log.warning("the spool %s: %s; nothing new is stored yet", directory, error.strerror)
            with contextlib.suppress(OSError):  # its cause was just said
                self._drop_settled()

    def append(self, batch: Batch) -> Stored:
        """Write a batch; when this returns it will be there after a crash.

        Raises:
            OSError: it could not be written; the spool is as before.
        """
        with self._lock:
            self._make_ready()
            number = self._last + 1
            body = pack_batch(StoredBatch(number, self._totals.appended, time.time_ns(), batch))
            full = self._sizes.get(self._segment, 0) + len(body) > self._segment_bytes
            if self._fd < 0 or (full and self._last >= self._segment):
                self._begin_segment()
            offset = self._write(Kind.BATCH, body)
            self._last = number
            self._totals.appended += batch.sample_count
            self._totals.end_unix_ns = max(self._totals.end_unix_ns, batch.end_unix_ns)
            size = HEADER_BYTES + len(body)
            since = self._now()
            return Stored(number, batch.sample_count, size, since, self._segment, offset)

    def read(self, stored: Stored) -> Batch:
        """A batch as it was put in.

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged.
        """
        with self._lock:
            if stored.segment == self._segment and self._fd >= 0:
                data = os.pread(self._fd, stored.size, stored.offset)
            else:
                fd = self._opened.open(name_segment(stored.segment), os.O_RDONLY)
                try:
                    data = os.pread(fd, stored.size, stored.offset)
                finally:
                    os.close(fd)
        record = parse_record(data)
        if record is None or record.kind != Kind.BATCH:
            raise ValueError(f"the spool {self._path}: {name_segment(stored.segment)} is damaged")
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
            self._totals.settled = max(self._totals.settled, number)
            self._totals.done += samples
            try:
                self._make_ready()
                if self._fd < 0:
                    self._begin_segment()
                else:
                    self._write(Kind.MARK, self._totals.pack())
            except OSError:
                if self._totals.settled < self._last:
                    raise
                # Nothing waits, so that what is on the disk is of no use but takes its room.
                self._end_segment()
                self._drop_settled()
                self._begin_segment()
            finally:
                self._drop_settled()

    def holds(self, stored: Stored) -> bool:
        """Whether a batch has not been settled, or given up by settling one after it."""
        return stored.number > self._totals.settled

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
            if self._closed:
                return
            try:
                if self._fd >= 0:
                    self._make_ready()
                    self._write(Kind.CLOSE, self._totals.pack())
            except OSError as error:
                _log.warning("the spool %s: cannot be closed in order: %s", self._path, error)
            self._let_go()
            self._closed = True

    @property
    def _opened(self) -> PrivateDirectory:
        if self._directory is None:
            raise OSError(errno.ENOENT, "the spool is not open")
        return self._directory

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the spool is closed")

    def _open(self) -> None:
        """Open the directory and take over what earlier runs have left there."""
        directory = PrivateDirectory(self._path)
        try:
            guard = _lock(directory)
            try:
                found = Recovery(directory, self._now())
            except BaseException:
                os.close(guard)
                raise
        except BaseException:
            directory.close()
            raise
        self._directory, self._guard = directory, guard
        self._totals, self._sizes, self._last = found.totals, found.sizes, found.last
        self.waiting.extend(found.waiting)
        self.damaged = found.damaged
        self.unknown_since_unix_ns = found.unknown_since_unix_ns

    def _let_go(self) -> None:
        self._end_segment()
        guard, self._guard = self._guard, -1
        if guard >= 0:
            os.close(guard)
        if self._directory:
            self._directory.close()

    def _make_ready(self) -> None:
        """Open what could not be opened at the start, and make anew what was removed since."""
        self._check_open()
        if self._directory is None:
            self._open()
            return
        if not self._directory.is_in_place() or not self._directory.holds(_LOCK, self._guard):
            self._move()
        if self._fd >= 0 and not self._directory.holds(name_segment(self._segment), self._fd):
            self._restore_segment()

    def _move(self) -> None:
        """Go on in the directory that is now at the path, made if there is none."""
        directory = PrivateDirectory(self._path)
        try:
            guard = _lock(directory)
        except BaseException:
            directory.close()
            raise
        same = self._opened.is_in_place()
        if not same and has_segments(directory):
            os.close(guard)
            directory.close()
            raise OSError(errno.ENOTEMPTY, "another spool is in its place; restart to go on there")
        _log.warning("the spool %s: %s was removed", self._path, _LOCK if same else "the directory")
        self._opened.close()
        os.close(self._guard)
        self._directory, self._guard = directory, guard
        if not same:
            written = {self._segment: self._sizes[self._segment]} if self._fd >= 0 else {}
            self._sizes = dict.fromkeys(self._sizes, 0) | written

    def _restore_segment(self) -> None:
        """Write the segment anew that has lost its name, from its descriptor."""
        directory, name = self._opened, name_segment(self._segment)
        unfinished = f"{name}.new"
        fd = directory.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            data = os.pread(self._fd, self._sizes[self._segment], 0)
            if os.pwrite(fd, data, 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301
            if self._fsync:
                os.fdatasync(fd)
            os.rename(unfinished, name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=directory.fd)
            raise
        os.close(self._fd)
        self._fd = fd
        if self._fsync:
            directory.sync()
        _log.warning("the spool %s: %s was removed: written anew", self._path, name)

    def _begin_segment(self) -> None:
        self._end_segment()
        # Numbers may be left out, but a name is never used again: its mark may be needed yet.
        segment = max(self._last, *self._sizes, 0) + 1
        directory, name = self._opened, name_segment(segment)
        fd = directory.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._fd, self._segment, self._sizes[segment] = fd, segment, 0
        try:
            self._write_bytes(MAGIC)
            self._write(Kind.MARK, self._totals.pack())
            if self._fsync:
                directory.sync()
        except OSError:
            # Without its mark it must not be continued: the next record tries again.
            self._end_segment()
            del self._sizes[segment]
            os.unlink(name, dir_fd=directory.fd)
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

    def _drop_settled(self) -> None:
        """Remove segments whose batches are all settled, but for the one that is written to."""
        segments = sorted(self._sizes)
        if self._fd < 0:
            segments.append(self._last + 1)
        for segment, following in itertools.pairwise(segments):
            if following > self._totals.settled + 1:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name_segment(segment), dir_fd=self._opened.fd)
            del self._sizes[segment]


def _lock(directory: PrivateDirectory) -> int:
    fd = directory.open(_LOCK, os.O_RDONLY | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise OSError(errno.EBUSY, "another process has it open") from None
    return fd


def _refusal(directory: str, error: OSError) -> ExportError:
    if error.errno == errno.EBUSY:
        return ExportError(
            f"the spool {directory} is in use",
            hint="give each agent a storage of its own; where a reload changes what is in"
            " storage, or its limits, restart the agent",
        )
    if error.errno == errno.EPERM:
        return ExportError(
            f"the spool {directory} is not safe: {error.strerror}",
            hint="give it to this user alone (chown, chmod 700), or choose another directory for"
            " sending_queue.storage",
        )
    return ExportError(
        f"the spool {directory} cannot be used: {error.strerror}",
        hint="give a directory on a disk with room that this user can write, or remove"
        " sending_queue.storage",
    )
