"""Reads the container format of ``perf.data`` files: header, sections, features and records.

The format is described in Linux's ``tools/perf/Documentation/perf.data-file-format.txt``. Names in
capital letters are those of ``tools/perf/util/header.h`` and ``include/uapi/linux/perf_event.h``.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.perf_data.cursor import Cursor
from otel_kprofiler.text import decode_name

MAGIC: Final = b"PERFILE2"
_HEADER_BYTES: Final = 104
_PIPE_HEADER_BYTES: Final = 16
_ATTR_MIN_BYTES: Final = 64  # PERF_ATTR_SIZE_VER0
_SECTION_BYTES: Final = 16
_RECORD: Final = struct.Struct("<IHH")
_ATTR_FIELDS: Final = struct.Struct("<IIQQQQQ")

_BUILD_ID, _HOSTNAME, _OSRELEASE, _EVENT_DESC, _CLOCK_DATA = 2, 3, 4, 12, 29  # HEADER_*
_FEATURES: Final = 256
_READ_FEATURES: Final = frozenset({_BUILD_ID, _HOSTNAME, _OSRELEASE, _EVENT_DESC, _CLOCK_DATA})

# PERF_RECORD_*: types from 64 on are written by perf, not by the kernel.
_ATTR, _TRACING_DATA, _BUILD_ID_RECORD, _AUXTRACE, _EVENT_UPDATE = 64, 66, 67, 71, 78
_FEATURE, _COMPRESSED, _COMPRESSED2 = 80, 81, 83
_UPDATE_NAME: Final = 2  # PERF_EVENT_UPDATE__NAME
_BUILD_ID_HAS_SIZE: Final = 1 << 15  # PERF_RECORD_MISC_BUILD_ID_SIZE
_BUILD_ID_BYTES: Final = 20
_BUILD_ID_FIELD_BYTES: Final = 24


class EventAttr(NamedTuple):
    """An event that was sampled (``struct perf_event_attr``).

    Attributes:
        type: the type of event, such as ``PERF_TYPE_SOFTWARE``.
        config: the event's number within its type.
        sample_type: the fields in the event's samples (``PERF_SAMPLE_*``).
        read_format: the fields in the event's counts (``PERF_FORMAT_*``).
        period: the number of events between two samples; 1 if each sample records its own period.
        has_ids: whether records other than samples end with fields of ``sample_type``
            (``sample_id_all``).
    """

    type: int
    config: int
    sample_type: int
    read_format: int
    period: int
    has_ids: bool


class RawRecord(NamedTuple):
    """A record's type and ``misc`` bits, and the position of its content in the file."""

    type: int
    misc: int
    start: int
    end: int


@dataclass(slots=True)
class PerfFile:
    """The contents of a ``perf.data`` file other than its records. Unknown strings are empty.

    Attributes:
        attrs: the sampled events, in file order.
        attr_by_id: indices in ``attrs``, by event id.
        names: the events' names, by index in ``attrs``.
        build_ids: the build ids in hexadecimal, by path.
        clock_offset_ns: Unix time minus the time on the records' clock; None if unknown.
    """

    attrs: list[EventAttr] = field(default_factory=list)
    attr_by_id: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    build_ids: dict[bytes, str] = field(default_factory=dict)
    hostname: str = ""
    os_release: str = ""
    clock_offset_ns: int | None = None


class Reader:
    """Reads a ``perf.data`` file, either seekable or written to a pipe (``perf record -o -``).

    Raises ``PayloadError`` if the file is not supported, or its header is malformed.

    Attributes:
        file: the file's contents, except for the records. In pipe format, other data is interleaved
            with the records, so this attribute is complete only after all records have been read.
        problem: why data is missing or malformed; empty if the file is intact.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.file = PerfFile()
        self.problem = ""
        if not data.startswith(MAGIC):
            raise PayloadError("not a perf.data file in this host's byte order")
        if len(data) < _PIPE_HEADER_BYTES:
            raise PayloadError("the header of the perf.data file is truncated")
        cursor = Cursor(data, len(MAGIC), len(data))
        size = cursor.u64()
        if size == _PIPE_HEADER_BYTES:
            self._start, self._end = _PIPE_HEADER_BYTES, len(data)
        elif size >= _HEADER_BYTES:
            self._read_header(cursor)
        else:
            raise PayloadError(
                f"the perf.data file has an unsupported header size of {size:,} bytes"
            )

    def _read_header(self, cursor: Cursor) -> None:
        attr_bytes = cursor.u64()
        attrs_start, attrs_bytes, start, nbytes = (cursor.u64() for _ in range(4))
        cursor.skip(_SECTION_BYTES)
        flags = int.from_bytes(cursor.take(_FEATURES // 8), "little")
        self._start, self._end = start, start + nbytes
        if nbytes == 0:  # perf completes the header when it exits
            self.problem, self._end = "perf record was killed", len(self.data)
        elif self._end > len(self.data):
            self.problem, self._end = "the file is truncated", len(self.data)
        if attr_bytes < _ATTR_MIN_BYTES + _SECTION_BYTES:
            raise PayloadError(
                f"the perf.data file has an unsupported attr size of {attr_bytes:,} bytes"
            )
        cursor = Cursor(self.data, attrs_start, attrs_start + attrs_bytes)
        while cursor.left >= attr_bytes:
            attr = _parse_attr(cursor.take(attr_bytes - _SECTION_BYTES))
            ids_start, ids_bytes = cursor.u64(), cursor.u64()
            self._add_attr(attr, Cursor(self.data, ids_start, ids_start + ids_bytes))
        if not self.problem:
            self._read_features(flags)

    def _read_features(self, flags: int) -> None:
        present = [number for number in range(_FEATURES) if flags >> number & 1]
        table = Cursor(self.data, self._end, len(self.data))
        for number in present:
            start, nbytes = table.u64(), table.u64()
            if number in _READ_FEATURES:
                try:
                    self._read_feature(number, Cursor(self.data, start, start + nbytes))
                except PayloadError as error:
                    self.problem = error.message

    def records(self) -> Iterator[RawRecord]:
        """Yields the kernel's records, up to the first malformed record.

        Raises ``PayloadError`` if the records are compressed.
        """
        position, end, data = self._start, self._end, self.data
        while position + _RECORD.size <= end:
            type_, misc, size = _RECORD.unpack_from(data, position)
            if size < _RECORD.size or position + size > end:
                self.problem = self.problem or f"the record at byte {position:,} is malformed"
                return
            body = position + _RECORD.size
            if type_ < _ATTR:
                yield RawRecord(type_, misc, body, position + size)
            else:
                size += self._read_own(type_, misc, Cursor(data, body, position + size))
            position += size
        if position != end:
            self.problem = self.problem or "the file is truncated"

    def _read_own(self, type_: int, misc: int, cursor: Cursor) -> int:
        """Reads a record written by perf, and returns the size of the data that follows it."""
        if type_ in (_COMPRESSED, _COMPRESSED2):
            raise PayloadError(
                "the records in the perf.data file are compressed",
                hint="run perf record without -z",
            )
        if type_ == _ATTR:
            size = int.from_bytes(cursor.data[cursor.position + 4 : cursor.position + 8], "little")
            self._add_attr(_parse_attr(cursor.take(size)), cursor)
        elif type_ == _EVENT_UPDATE:
            kind, event_id = cursor.u64(), cursor.u64()
            if kind == _UPDATE_NAME and event_id in self.file.attr_by_id:
                self.file.names[self.file.attr_by_id[event_id]] = decode_name(cursor.name())
        elif type_ == _FEATURE:
            number = cursor.u64()
            if number in _READ_FEATURES:
                self._read_feature(number, cursor)
        elif type_ == _BUILD_ID_RECORD:
            self._add_build_id(misc, cursor)
        elif type_ == _TRACING_DATA:
            return -(-cursor.u32() // 8) * 8
        elif type_ == _AUXTRACE:
            return cursor.u64()
        return 0

    def _read_feature(self, number: int, cursor: Cursor) -> None:
        file = self.file
        if number == _HOSTNAME:
            file.hostname = decode_name(cursor.string())
        elif number == _OSRELEASE:
            file.os_release = decode_name(cursor.string())
        elif number == _BUILD_ID:
            while cursor.left >= _RECORD.size:
                _, misc, size = _RECORD.unpack_from(cursor.data, cursor.position)
                start = cursor.skip(max(size, _RECORD.size))
                self._add_build_id(misc, Cursor(cursor.data, start + _RECORD.size, start + size))
        elif number == _EVENT_DESC:
            count, attr_bytes = cursor.u32(), cursor.u32()
            for index in range(min(count, len(file.attrs))):
                cursor.skip(attr_bytes)
                ids = cursor.u32()
                file.names[index] = decode_name(cursor.string())
                cursor.skip(8 * ids)
        elif number == _CLOCK_DATA:
            cursor.skip(8)  # version, clock
            file.clock_offset_ns = cursor.u64() - cursor.u64()

    def _add_attr(self, attr: EventAttr, ids: Cursor) -> None:
        while ids.left >= 8:
            self.file.attr_by_id[ids.u64()] = len(self.file.attrs)
        self.file.attrs.append(attr)

    def _add_build_id(self, misc: int, cursor: Cursor) -> None:
        cursor.skip(4)  # pid
        build_id = cursor.take(_BUILD_ID_FIELD_BYTES)
        size = build_id[_BUILD_ID_BYTES] if misc & _BUILD_ID_HAS_SIZE else _BUILD_ID_BYTES
        self.file.build_ids[cursor.name()] = build_id[: min(size, _BUILD_ID_BYTES)].hex()


def _parse_attr(raw: bytes) -> EventAttr:
    if len(raw) < _ATTR_MIN_BYTES:
        raise PayloadError("an event attribute in the perf.data file is malformed")
    type_, _, config, period, sample_type, read_format, flags = _ATTR_FIELDS.unpack_from(raw)
    has_rate, has_ids = bool(flags >> 10 & 1), bool(flags >> 18 & 1)
    period = 1 if has_rate else period
    return EventAttr(type_, config, sample_type, read_format, period, has_ids)
