"""Keeps batches on disk, in a segmented append-only log that survives truncation at any byte.

SQLite is not suitable, because in WAL mode, it cannot read a truncated main file.

A segment is a file ``NUMBER.spool``, named after the lowest batch number that it may hold.
:mod:`otel_kprofiler.export.segments` describes its format. Each process starts a new segment, so no
data is ever written after a corrupt record.

- A *batch* record contains a batch, its number, and the number of samples appended before it, by
  kind.
- A *mark* contains the number of the last settled batch, and the totals at that time. Each segment
  starts with a mark, so that older segments can be deleted.
- A *close* record is a mark at the end of a cleanly closed log.

The counts in every record show exactly how many samples of each kind a corrupt segment contained.

Anything removed from an open spool, even its directory, is recreated on the next write, and the
current segment is restored completely. The loss of an older segment is detected on the next read.
"""

import contextlib
import errno
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from otel_kprofiler.errors import describe_error
from otel_kprofiler.export.disk_thread import DiskThread
from otel_kprofiler.export.recovery import (
    LOCK,
    MAX_SEGMENT_BYTES,
    Recovery,
    Stored,
    has_segments,
    lock_directory,
    name_segment,
)
from otel_kprofiler.export.segments import (
    HEADER_BYTES,
    MAGIC,
    MAX_NUMBER,
    Kind,
    StoredBatch,
    Totals,
    name_losses,
    pack_batch,
    pack_record,
    parse_record,
    unpack_batch,
)
from otel_kprofiler.export.storage_log import explain_refusal
from otel_kprofiler.host import PrivateDirectory
from otel_kprofiler.model import Batch, LossCause, Losses, SampleCounts

DEFAULT_MAX_BYTES: Final = 1024 * 1024 * 1024
DEFAULT_MAX_AGE_S: Final = 24 * 3600.0

_SEGMENTS: Final = 8
"""Minimum number of segments that the size limit allows. The oldest segment is dropped whole."""

_TRANSIENT: Final = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ETIMEDOUT}
"""Disk errors that may disappear without a configuration change, such as a full disk."""

_log = logging.getLogger(__name__)


class Spool:
    """The spool of one exporter, open in one process at a time. Thread-safe.

    If the disk is full, read-only or hung at startup, every call to :meth:`append` tries to open
    the spool. Batches from earlier runs appear in ``waiting`` once the spool is open.

    The disk is accessed in a separate thread, so that a hung disk delays a call by at most
    :data:`~.disk_thread.PATIENCE_S`. The call then raises ``TimeoutError``. A batch whose append
    timed out is removed again once the disk responds.

    Args:
        directory: the spool's directory; created with mode 0700 if missing.
        max_bytes: maximum total size of the segments; when exceeded, the oldest segment is dropped.
        max_age_s: age in seconds at which batches are dropped; 0 means never.
        fsync: whether to sync each record. Unsynced records survive a crash of the process, but not
            of the machine.
        now: returns the monotonic time, in seconds.

    Raises:
        ExportError: the directory is unusable, writable by other users, or open in another process.

    Attributes:
        waiting: undelivered batches from earlier runs, oldest first.
        damaged: number of samples from earlier runs that can no longer be read, by kind.
        earlier: number of samples from all earlier runs, by kind.
        earlier_lost: number of samples lost by earlier runs, by kind and cause.
        unknown_since_unix_ns: 0 if the previous run closed the log. If the previous run was killed,
            the time from which its sample counts are incomplete; 1 if that time is unknown.
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
        self._segment_bytes = min(MAX_SEGMENT_BYTES, max_bytes // _SEGMENTS)
        self._max_age_s = max_age_s
        self._fsync = fsync
        self._now = now
        self._disk = DiskThread()
        self._totals = Totals()
        self._sizes: dict[int, int] = {}
        self._directory: PrivateDirectory | None = None
        self._guard = self._fd = -1
        self._segment = 0
        self._last = 0
        self._closed = False
        self.waiting: deque[Stored] = deque()
        self.damaged = SampleCounts()
        self.earlier = SampleCounts()
        self.earlier_lost: dict[str, dict[LossCause, int]] = {}
        self.unknown_since_unix_ns = 0
        try:
            self._disk.call(self._start)
        except OSError as error:
            if error.errno not in _TRANSIENT:
                self._release()
                self._disk.close()
                raise explain_refusal(directory, error) from error
            why = "still being read, or " if isinstance(error, TimeoutError) else ""
            _log.warning("the spool %s cannot store data yet: %s%s", directory, why, error.strerror)
            with contextlib.suppress(OSError):  # the cause was just logged
                self._disk.call(self._drop_settled)

    @property
    def is_hung(self) -> bool:
        """Returns whether the disk does not respond. Attributes may then change at any time."""
        return self._disk.is_hung

    def append(
        self, batch: Batch, rest: SampleCounts | None = None, *, is_part: bool = False
    ) -> Stored:
        """Write a batch to disk, so that the batch survives a crash.

        ``rest`` counts the samples in later batches of the same window, by kind. Set ``is_part`` if
        ``batch`` is part of a batch appended earlier.

        Raises:
            OSError: the batch could not be written; the spool is unchanged.
        """
        samples = batch.sample_counts

        def write() -> Stored:
            self._make_ready()
            number = self._last + 1
            earlier = self._totals.appended - samples if is_part else self._totals.appended
            body = pack_batch(
                StoredBatch(number, earlier, time.time_ns(), batch, rest or SampleCounts())
            )
            full = self._sizes.get(self._segment, 0) + len(body) > self._segment_bytes
            if self._fd < 0 or (full and self._last >= self._segment):
                self._begin_segment()
            offset = self._write(Kind.BATCH, body)
            try:
                self._disk.confirm()
            except TimeoutError:
                self._cut(offset)
                raise
            self._last = number
            self._totals.appended = earlier + samples
            self._totals.end_unix_ns = max(self._totals.end_unix_ns, batch.end_unix_ns)
            size, now = HEADER_BYTES + len(body), self._now()
            return Stored(number, samples, size, now, self._segment, offset)

        return self._disk.call(write)

    def read(self, stored: Stored) -> Batch:
        """Read a batch.

        Raises ``OSError`` on failure, and ``ValueError`` if the data is corrupt.
        """
        record = parse_record(self._disk.call(lambda: self._read(stored)))
        if record is None or record.kind != Kind.BATCH:
            raise ValueError(f"spool {self._path}: {name_segment(stored.segment)} is corrupt")
        return unpack_batch(record.body).batch

    def _read(self, stored: Stored) -> bytes:
        if stored.segment == self._segment and self._fd >= 0:
            return os.pread(self._fd, stored.size, stored.offset)
        fd = self._opened.open(name_segment(stored.segment), os.O_RDONLY)
        try:
            return os.pread(fd, stored.size, stored.offset)
        finally:
            os.close(fd)

    def settle(
        self, number: int, samples: SampleCounts, lost: Mapping[str, Losses] | None = None
    ) -> None:
        """Record a batch as delivered or lost, and delete segments that are no longer needed.

        Args:
            number: number of the batch. All earlier batches are also settled.
            samples: number of samples exported or lost since the last call, by kind.
            lost: how many of ``samples`` were lost, by kind and cause.

        Raises:
            OSError: the record cannot be written, so the batch would be sent again after a crash.
        """
        self._disk.call(lambda: self._settle(number, samples, lost or {}), is_kept=True)

    def _settle(self, number: int, samples: SampleCounts, lost: Mapping[str, Losses]) -> None:
        self._check_open()
        self._totals.settled = max(self._totals.settled, number)
        self._totals.done += samples
        for kind, losses in lost.items():
            self._totals.lost += name_losses(kind, losses)
        try:
            self._make_ready()
            if self._fd < 0:
                self._begin_segment()
            else:
                self._write(Kind.MARK, self._totals.pack())
        except OSError:
            if self._totals.settled < self._last:
                raise
            # No batch is waiting, so all segments can be deleted to free disk space.
            self._end_segment()
            self._drop_settled()
            self._begin_segment()
        finally:
            self._drop_settled()

    def holds(self, stored: Stored) -> bool:
        """Returns whether a batch is still in the spool."""
        return stored.number > self._totals.settled

    def find_overdue(
        self, waiting: Iterable[Stored], more: int
    ) -> tuple[list[Stored], LossCause | None]:
        """Returns the oldest batches, to drop before appending ``more`` bytes, and why.

        Reads only those batches from ``waiting``, and the next.
        """
        waiting = iter(waiting)
        first = next(waiting, None)
        if first is None:
            return [], None
        oldest = self._now() - self._max_age_s
        if self._max_age_s and first.since_s < oldest:
            rest = itertools.takewhile(lambda stored: stored.since_s < oldest, waiting)
            return [first, *rest], LossCause.SPOOL_AGED
        if sum(self._sizes.values()) + more <= self._max_bytes:
            return [], None
        # If this is the current segment, appending the next batch starts a new segment.
        rest = itertools.takewhile(lambda stored: stored.segment == first.segment, waiting)
        return [first, *rest], LossCause.SPOOL_FULL

    def close(self) -> None:
        """Mark the log as complete and release the lock; idempotent."""
        if self._disk.is_closed:
            return
        try:
            self._disk.call(self._close, is_kept=True)
        except TimeoutError as error:
            self._warn_unclean(error)
        self._disk.close()

    def _close(self) -> None:
        if self._closed:
            return
        try:
            if self._fd >= 0:
                self._make_ready()
                self._write(Kind.CLOSE, self._totals.pack())
        except OSError as error:
            self._warn_unclean(error)
        self._release()
        self._closed = True

    def _warn_unclean(self, error: OSError) -> None:
        reason = describe_error(error)
        _log.warning("the spool %s cannot be closed cleanly: %s", self._path, reason)

    @property
    def _opened(self) -> PrivateDirectory:
        if self._directory is None:
            raise OSError(errno.ENOENT, "the spool is not open")
        return self._directory

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the spool is closed")

    def _start(self) -> None:
        self._open()
        self._begin_segment()

    def _open(self) -> None:
        directory = PrivateDirectory(self._path)
        try:
            guard = lock_directory(directory)
            try:
                recovery = Recovery(directory, self._now())
            except BaseException:
                os.close(guard)
                raise
        except BaseException:
            directory.close()
            raise
        self._directory, self._guard = directory, guard
        self._totals, self._sizes, self._last = recovery.totals, recovery.sizes, recovery.last
        self.waiting.extend(recovery.waiting)
        self.damaged = recovery.damaged
        self.earlier, self.earlier_lost = recovery.earlier, recovery.earlier_lost
        self.unknown_since_unix_ns = recovery.unknown_since_unix_ns

    def _release(self) -> None:
        self._end_segment()
        guard, self._guard = self._guard, -1
        if guard >= 0:
            os.close(guard)
        if self._directory:
            self._directory.close()

    def _make_ready(self) -> None:
        """Open the spool if it could not be opened at startup, and recreate removed files."""
        self._check_open()
        if self._directory is None:
            self._open()
            return
        if not self._directory.is_in_place() or not self._directory.holds(LOCK, self._guard):
            self._move()
        if self._fd >= 0 and not self._directory.holds(name_segment(self._segment), self._fd):
            self._restore_segment()

    def _move(self) -> None:
        """Switch to the directory that is now at the spool's path, creating it if necessary."""
        directory = PrivateDirectory(self._path)
        try:
            guard = lock_directory(directory)
        except BaseException:
            directory.close()
            raise
        same = self._opened.is_in_place()
        if not same and has_segments(directory):
            os.close(guard)
            directory.close()
            raise OSError(errno.ENOTEMPTY, "another spool is now at this path; restart to use it")
        _log.warning("the spool %s: %s was removed", self._path, LOCK if same else "the directory")
        self._opened.close()
        os.close(self._guard)
        self._directory, self._guard = directory, guard
        if not same:
            written = {self._segment: self._sizes[self._segment]} if self._fd >= 0 else {}
            self._sizes = dict.fromkeys(self._sizes, 0) | written

    def _restore_segment(self) -> None:
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
        _log.warning("the spool %s: restored %s, which was removed", self._path, name)

    def _begin_segment(self) -> None:
        self._end_segment()
        # Segment numbers are not reused, because the mark record in an old segment may be needed.
        segment = max(self._last, *self._sizes, 0) + 1
        if segment >= MAX_NUMBER:
            name = name_segment(segment - 1)
            raise OSError(errno.EOVERFLOW, f"{name} has the maximum segment number")
        directory, name = self._opened, name_segment(segment)
        fd = directory.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._fd, self._segment, self._sizes[segment] = fd, segment, 0
        try:
            self._write_bytes(MAGIC)
            self._write(Kind.MARK, self._totals.pack())
            if self._fsync:
                directory.sync()
        except OSError:
            # A segment without its initial mark must not be appended to, so the next record
            # begins a new segment.
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
        """Append a record atomically, and return its offset."""
        return self._write_bytes(pack_record(kind, body))

    def _write_bytes(self, data: bytes) -> int:
        offset = self._sizes[self._segment]
        try:
            if os.pwrite(self._fd, data, offset) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301
            if self._fsync:
                os.fdatasync(self._fd)
        except OSError:
            self._cut(offset)
            raise
        self._sizes[self._segment] = offset + len(data)
        return offset

    def _cut(self, offset: int) -> None:
        try:
            os.ftruncate(self._fd, offset)
            self._sizes[self._segment] = offset
        except OSError:
            self._end_segment()  # a record appended to a partial record would be unreadable

    def _drop_settled(self) -> None:
        """Delete segments without waiting batches, except the segment being written."""
        segments = sorted(self._sizes)
        if self._fd < 0:
            segments.append(self._last + 1)
        for segment, following in itertools.pairwise(segments):
            if following > self._totals.settled + 1:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name_segment(segment), dir_fd=self._opened.fd)
            del self._sizes[segment]
