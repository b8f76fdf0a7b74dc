"""Recovery of a spool: the intact batches of earlier runs, and the count of damaged samples."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from typing import Final, NamedTuple

from otel_kprofiler.export.segments import (
    MAGIC,
    Kind,
    Record,
    Totals,
    find_other_version,
    find_records,
    unpack_batch,
    unpack_totals,
)
from otel_kprofiler.host import PrivateDirectory
from otel_kprofiler.model import SampleCounts

_NAME: Final = re.compile(r"(\d{20})\.spool(\.aside)?")
_BLOCK_BYTES: Final = 4096
"""Unit in which a failing disk is read."""
_EARLIEST_S: Final = 1_600_000_000
"""An earlier wall clock (2020) was not set, so the age of a batch is unknown."""

_log = logging.getLogger(__name__)


class Stored(NamedTuple):
    """A batch in the spool.

    Attributes:
        number: consecutive number of the batch.
        samples: number of samples in the batch, by kind.
        size: bytes of the record.
        since_s: when it was appended, in monotonic seconds.
        segment: number in the name of its segment.
        offset: position of its record in the segment.
    """

    number: int
    samples: SampleCounts
    size: int
    since_s: float
    segment: int
    offset: int


def name_segment(segment: int) -> str:
    """File name of a segment."""
    return f"{segment:020}.spool"


def has_segments(directory: PrivateDirectory) -> bool:
    """Whether the directory has files named like segments."""
    return any(map(_NAME.fullmatch, os.listdir(directory.fd)))


class Recovery:
    """Reads all segments of a directory, oldest first.

    Segments of another version are renamed to ``NUMBER.spool.aside``. What cannot be opened as a
    regular file of this user is left alone.

    Args:
        directory: the spool's directory.
        now_s: monotonic seconds.

    Raises:
        OSError: the directory cannot be listed.

    Attributes:
        totals: the latest totals of all records.
        waiting: undelivered batches, oldest first.
        last: the highest number in use.
        sizes: bytes of each segment, by number.
        damaged: samples appended that are neither done nor readable, by kind.
        unknown_since_unix_ns: when not 0, the end of the log is missing, and what was taken after
            this time is unknown; 1 if the time is unknown too.
    """

    def __init__(self, directory: PrivateDirectory, now_s: float) -> None:
        self._directory = directory
        self._now_s = now_s
        self._wall_s = time.time()
        self._closed = True
        self.totals = Totals()
        self.last = 0
        self.sizes: dict[int, int] = {}
        found: dict[int, Stored] = {}  # by number, in case part of the log is duplicated
        for name in sorted(os.listdir(directory.fd)):
            if match := _NAME.fullmatch(name):
                segment, aside = int(match[1]), match[2]
                self.last = max(self.last, segment if aside else segment - 1)
                if not aside:
                    found |= {one.number: one for one in self._read_segment(name, segment)}
        totals = self.totals
        # Settled numbers must not be reused, even if their records are damaged.
        self.last = max(self.last, totals.settled)
        self.waiting = [found[number] for number in sorted(found) if number > totals.settled]
        # Each appended sample is done, waiting, or unreadable.
        self.damaged = totals.appended - totals.done
        for stored in self.waiting:
            self.damaged -= stored.samples
        totals.done += self.damaged
        self.unknown_since_unix_ns = 0 if self._closed else max(totals.end_unix_ns, 1)

    def _read_segment(self, name: str, segment: int) -> list[Stored]:
        try:
            data = _read(self._directory, name)
        except OSError as error:
            self.last = max(self.last, segment)
            self._closed = False
            self._warn("%s is left alone because it cannot be read: %s", name, error.strerror)
            return []
        version = find_other_version(data)
        if version:
            self.last = max(self.last, segment)
            self._put_aside(name, version)
            return []
        self.sizes[segment] = len(data)
        found: list[Stored] = []
        end = len(MAGIC) if data.startswith(MAGIC) else 0
        unreadable = len(data) - end
        self._closed = False
        for record in find_records(data, segment):
            unreadable -= record.size
            try:
                stored = self._apply(record, segment)
            except ValueError as error:
                self._warn("a record of %s is skipped: %s", name, error)
                continue
            found += [stored] if stored else []
            end = record.offset + record.size
            self._closed = record.kind == Kind.CLOSE
        self._closed = self._closed and end == len(data)
        if unreadable:
            self._warn("%d bytes of %s are unreadable", unreadable, name)
        return found

    def _apply(self, record: Record, segment: int) -> Stored | None:
        """Update the totals from a record; returns its batch, if any."""
        if record.kind != Kind.BATCH:
            if record.kind not in (Kind.MARK, Kind.CLOSE):
                raise ValueError(f"unknown kind {record.kind}")
            self.totals.include(unpack_totals(record.body))
            return None
        number, before, put_unix_ns, batch = unpack_batch(record.body)
        samples = batch.sample_counts
        self.totals.include(Totals(appended=before + samples, end_unix_ns=batch.end_unix_ns))
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
            self._warn(
                "%s was written by another version, %s, but cannot be renamed: %s",
                name,
                version,
                error,
            )
        else:
            self._warn(
                "%s was written by another version, %s, which can send it: kept as %s",
                name, version, aside,
            )  # fmt: skip

    def _warn(self, text: str, *values: object) -> None:
        _log.warning("the spool %s: " + text, self._directory.path, *values)


def _read(directory: PrivateDirectory, name: str) -> bytes:
    """A whole file, with zeros for unreadable blocks."""
    fd = directory.open(name, os.O_RDONLY)
    blocks = []
    try:
        size = os.fstat(fd).st_size
        for at in range(0, size, _BLOCK_BYTES):
            try:
                blocks.append(os.pread(fd, _BLOCK_BYTES, at))
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                blocks.append(bytes(min(_BLOCK_BYTES, size - at)))
    finally:
        os.close(fd)
    return b"".join(blocks)
