"""Recovers earlier runs' intact batches from a spool, and counts samples in corrupt batches."""

import errno
import fcntl
import logging
import os
import re
import time
from typing import Final, NamedTuple

from otel_kprofiler.export.segments import (
    HEADER_BYTES,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_NUMBER,
    Kind,
    Record,
    Totals,
    find_other_version,
    find_records,
    name_losses,
    split_losses,
    unpack_batch,
    unpack_totals,
)
from otel_kprofiler.host import PrivateDirectory
from otel_kprofiler.model import LossCause, SampleCounts

LOCK: Final = "lock"
"""Name of the file that is locked while a spool is open."""
_NAME: Final = re.compile(r"(\d{20})\.spool(\.aside)?")
_BLOCK_BYTES: Final = 4096
"""Number of bytes per read from a failing disk."""
MAX_SEGMENT_BYTES: Final = 16 * 1024 * 1024
"""Size above which a spool starts a new segment, in bytes."""
_MAX_READ_BYTES: Final = MAX_SEGMENT_BYTES + HEADER_BYTES + MAX_BODY_BYTES
"""Maximum size of a segment. The last record may exceed :data:`MAX_SEGMENT_BYTES`."""
_EARLIEST_S: Final = 1_600_000_000
"""A Unix time in 2020. If the wall clock shows an earlier time, it has not been set."""

_log = logging.getLogger(__name__)


class Stored(NamedTuple):
    """A batch in the spool.

    Attributes:
        size: size of the batch's record in the segment, in bytes.
        since_s: monotonic time of the append, in seconds.
        offset: position of the batch's record in the segment, in bytes.
    """

    number: int
    samples: SampleCounts
    size: int
    since_s: float
    segment: int
    offset: int


def name_segment(segment: int) -> str:
    """Returns the file name of a segment."""
    return f"{segment:020}.spool"


def has_segments(directory: PrivateDirectory) -> bool:
    """Returns whether the directory contains files named like segments."""
    return any(map(_NAME.fullmatch, os.listdir(directory.fd)))


def lock_directory(directory: PrivateDirectory) -> int:
    """Locks a spool, and returns the descriptor that holds the lock.

    Raises ``OSError``: ``EBUSY`` if the spool is open in another process.
    """
    fd = directory.open(LOCK, os.O_RDONLY | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise OSError(errno.EBUSY, "another process has opened the spool") from None
    return fd


def count_undelivered(path: str) -> SampleCounts:
    """Returns the number of samples, by kind, that the spool in a directory has not delivered.

    Raises ``OSError`` if the directory cannot be read, or is open in another process or spool.
    """
    directory = PrivateDirectory(path)
    try:
        if not has_segments(directory):
            return SampleCounts()
        os.close(lock_directory(directory))  # released, so that an exporter can open the spool
        waiting = Recovery(directory, time.monotonic()).waiting
    finally:
        directory.close()
    return sum((stored.samples for stored in waiting), SampleCounts())


class Recovery:
    """Reads all segments in a spool directory, oldest first.

    Segments written by other versions are renamed to ``NUMBER.spool.aside``. Their samples are not
    delivered, and count neither as recovered nor as lost. Anything that is not a regular file owned
    by this user is left unchanged. Raises ``OSError`` if the directory cannot be listed.

    Attributes:
        totals: the latest totals recorded in the segments.
        last: the highest batch number in use; new batches are given higher numbers.
        sizes: size of each segment in bytes, by segment number.
        damaged: number of undelivered samples that are unreadable, by kind. Includes the samples in
            corrupt batches, and those in the last window that were not appended before the process
            was killed.
        waiting, earlier, earlier_lost, unknown_since_unix_ns: see :class:`~.spool.Spool`.
    """

    def __init__(self, directory: PrivateDirectory, now_s: float) -> None:
        self._directory = directory
        self._now_s = now_s
        self._wall_s = time.time()
        self._closed = True
        self._is_whole = True  # whether the preceding segment is intact
        self._aside_from: SampleCounts | None = None  # samples that precede the aside segments
        self._rest = SampleCounts()  # samples that follow the last batch in its window
        self._appended = SampleCounts()  # samples appended up to the last batch
        self._aside: list[tuple[SampleCounts, SampleCounts]] = []
        self.totals = Totals()
        self.last = 0
        self.sizes: dict[int, int] = {}
        intact: dict[int, Stored] = {}  # by batch number, because part of the log may be duplicated
        for name in sorted(os.listdir(directory.fd)):
            if not (match := _NAME.fullmatch(name)):
                continue
            segment, is_aside = int(match[1]), bool(match[2])
            if segment >= MAX_NUMBER:
                self._warn("%s is ignored: its number is out of range", name)
                continue
            self.last = max(self.last, segment if is_aside else segment - 1)
            if is_aside:
                self._begin_aside()
            else:
                for stored in self._read_segment(name, segment):
                    intact[stored.number] = stored
        totals = self.totals
        if totals.appended == self._appended:  # nothing was recorded after the last batch
            totals.appended += self._rest
        # Numbers of settled batches must not be reused, even if the records are corrupt.
        self.last = max(self.last, totals.settled)
        self.waiting = [intact[number] for number in sorted(intact) if number > totals.settled]
        # Each appended sample was delivered or lost, or is waiting, set aside or unreadable.
        unreadable = totals.appended - totals.done
        for stored in self.waiting:
            unreadable -= stored.samples
        aside = self._count_aside()
        self.damaged = unreadable - aside
        totals.done += unreadable
        totals.aside += aside
        self.earlier = totals.appended - totals.aside
        self.earlier_lost = split_losses(totals.lost)
        for kind, count in self.damaged.items():
            totals.lost += name_losses(kind, {LossCause.SPOOL_DAMAGED: count})
        self.unknown_since_unix_ns = 0 if self._closed else max(totals.end_unix_ns, 1)

    def _begin_aside(self) -> None:
        """Record the number of samples before a set-aside segment, if the number is known."""
        if self._is_whole and self._aside_from is None:
            self._aside_from = self.totals.appended.copy()

    def _end_aside(self, opening: Record) -> None:
        """Store the number of samples before ``opening``, the record after the renamed segments."""
        aside_from, self._aside_from = self._aside_from, None
        if aside_from is not None and opening.kind == Kind.MARK and opening.offset == len(MAGIC):
            self._aside.append((aside_from, unpack_totals(opening.body).appended))

    def _count_aside(self) -> SampleCounts:
        aside = SampleCounts()
        for aside_from, through in self._aside:
            aside += through - (aside_from | self.totals.done)
        return aside

    def _read_segment(self, name: str, segment: int) -> list[Stored]:
        try:
            data, size = _read(self._directory, name)
        except OSError as error:
            self.last = max(self.last, segment)
            self._closed = self._is_whole = False
            self._warn("%s is ignored because it cannot be read: %s", name, error.strerror)
            return []
        version = find_other_version(data)
        if version:
            self.last = max(self.last, segment)
            self._put_aside(name, version)
            self._begin_aside()
            return []
        self.sizes[segment] = len(data)
        batches: list[Stored] = []
        end = len(MAGIC) if data.startswith(MAGIC) else 0
        unreadable = size - end
        self._closed = False
        for record in find_records(data, segment):
            unreadable -= record.size
            try:
                self._end_aside(record)
                stored = self._apply(record, segment)
            except ValueError as error:
                self._warn("a record of %s is skipped: %s", name, error)
                continue
            batches += [stored] if stored else []
            end = record.offset + record.size
            self._closed = record.kind == Kind.CLOSE
        self._closed = self._closed and end == size
        self._is_whole = not unreadable
        if unreadable:
            self._warn("%d bytes of %s are unreadable", unreadable, name)
        return batches

    def _apply(self, record: Record, segment: int) -> Stored | None:
        """Update the totals from a record.

        Return the record's batch; None if the record is not a batch.
        """
        if record.kind != Kind.BATCH:
            if record.kind not in (Kind.MARK, Kind.CLOSE):
                raise ValueError(f"unknown kind {record.kind}")
            self.totals.include(unpack_totals(record.body))
            return None
        number, earlier, put_unix_ns, batch, rest = unpack_batch(record.body)
        samples = batch.sample_counts
        self.totals.include(Totals(appended=earlier + samples, end_unix_ns=batch.end_unix_ns))
        if number > self.last:
            self._rest, self._appended = rest, earlier + samples
        self.last = max(self.last, number)
        put_s = put_unix_ns / 1e9
        age_s = max(0.0, self._wall_s - put_s) if put_s > _EARLIEST_S else 0.0
        since_s = self._now_s - age_s
        return Stored(number, samples, record.size, since_s, segment, record.offset)

    def _put_aside(self, name: str, version: str) -> None:
        aside = f"{name}.aside"
        try:
            fd = self._directory.fd
            os.rename(name, aside, src_dir_fd=fd, dst_dir_fd=fd)
        except OSError as error:
            outcome = f"cannot be renamed: {error.strerror}"
        else:
            outcome = f"kept as {aside}"
        self._warn(
            "%s was written by another version (format %s), which can send it; %s",
            name, version, outcome,
        )  # fmt: skip

    def _warn(self, text: str, *values: object) -> None:
        _log.warning("the spool %s: " + text, self._directory.path, *values)


def _read(directory: PrivateDirectory, name: str) -> tuple[bytes, int]:
    """Returns a segment's content, with zeros for unreadable blocks, and the file's size.

    Omits data that no spool writes: holes at the end, and anything beyond the maximum segment size.
    """
    fd = directory.open(name, os.O_RDONLY)
    blocks = []
    try:
        size = os.fstat(fd).st_size
        end = _find_end_of_data(fd, min(size, _MAX_READ_BYTES))
        for at in range(0, end, _BLOCK_BYTES):
            length = min(_BLOCK_BYTES, end - at)
            try:
                blocks.append(os.pread(fd, length, at))
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                blocks.append(bytes(length))
    finally:
        os.close(fd)
    return b"".join(blocks), size


def _find_end_of_data(fd: int, limit: int) -> int:
    """Returns the offset at which the last data before a limit ends (lseek(2), ``SEEK_DATA``)."""
    end = at = 0
    try:
        while at < limit:
            end = at = os.lseek(fd, os.lseek(fd, at, os.SEEK_DATA), os.SEEK_HOLE)
    except OSError as error:
        if error.errno != errno.ENXIO:  # no data after the offset
            raise
    return min(end, limit)
