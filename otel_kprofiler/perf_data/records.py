"""Decodes the kernel's perf records (``include/uapi/linux/perf_event.h``)."""

import struct
from collections.abc import Iterator
from operator import attrgetter
from typing import Final, NamedTuple

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.perf_data.cursor import Cursor
from otel_kprofiler.perf_data.file import EventAttr, RawRecord, Reader

MMAP, LOST, COMM, THROTTLE, FORK, SAMPLE = 1, 2, 3, 5, 7, 9
MMAP2, LOST_SAMPLES, KSYMBOL = 10, 13, 17
_NEEDED: Final = {MMAP, LOST, COMM, THROTTLE, FORK, SAMPLE, MMAP2, LOST_SAMPLES, KSYMBOL}

KERNEL_MODE, USER_MODE = 1, 2  # PERF_RECORD_MISC_CPUMODE
_MODE_MASK: Final = 7
_COMM_EXEC: Final = 1 << 13
_MMAP_DATA: Final = 1 << 13
_MMAP_BUILD_ID: Final = 1 << 14
_EXECUTABLE: Final = 4  # PROT_EXEC

_IP, _TID, _TIME, _ADDR, _READ, _CALLCHAIN = (1 << bit for bit in range(6))
_ID, _CPU, _PERIOD, _STREAM_ID = (1 << bit for bit in range(6, 10))
_IDENTIFIER: Final = 1 << 16
STACK_USER: Final = 1 << 13
_ENABLED, _RUNNING, _FORMAT_ID, _GROUP, _FORMAT_LOST = (1 << bit for bit in range(5))
NO_TIME: Final = -1


class Sample(NamedTuple):
    """A sample, as recorded.

    Attributes:
        time_ns: the time on the recording's clock; :data:`NO_TIME` if not recorded.
        event: the index of the sampled event.
        pid: the process id; 0 for the idle task.
        cpu: the logical CPU; 0 if not recorded.
        period: the number of events that the sample represents.
        mode: whether kernel or user code was sampled (``PERF_RECORD_MISC_CPUMODE``).
        chain: the callchain as 64-bit words with ``PERF_CONTEXT_*`` markers; without a callchain,
            the address of the sampled instruction.
    """

    time_ns: int
    event: int
    pid: int
    tid: int
    cpu: int
    period: int
    mode: int
    chain: bytes


class FileMapping(NamedTuple):
    """An executable mapping in a process, or in the kernel if ``pid`` is -1."""

    time_ns: int
    pid: int
    start: int
    end: int
    offset: int
    path: bytes
    build_id: str


class Comm(NamedTuple):
    """A new thread name. ``is_exec`` is set if the process executed a program."""

    time_ns: int
    pid: int
    tid: int
    name: bytes
    is_exec: bool


class Fork(NamedTuple):
    """A new thread, or a new process if ``pid`` differs from ``parent``."""

    time_ns: int
    pid: int
    tid: int
    parent: int
    parent_tid: int


class Ksymbol(NamedTuple):
    """Kernel code that was loaded, such as a BPF program."""

    time_ns: int
    start: int
    end: int
    name: bytes


class Loss(NamedTuple):
    """The number of lost records, or of lost samples if ``is_samples`` is set."""

    time_ns: int
    event: int
    records: int
    is_samples: bool


class Throttle(NamedTuple):
    """A pause in sampling, imposed by the kernel because the rate was too high."""

    time_ns: int


Record = Sample | FileMapping | Comm | Fork | Ksymbol | Loss | Throttle
_BY_TIME: Final = attrgetter("time_ns")


def read_records(reader: Reader) -> list[Record]:
    """Returns the records, sorted by time, or in file order where times are equal or missing.

    Skips malformed records, and reports them in the reader's ``problem``. Raises ``PayloadError``
    if the records are compressed, or if a record written by perf itself is malformed.
    """
    decoder = _Decoder(reader)
    records: list[Record] = []
    for raw in reader.records():
        if raw.type in _NEEDED:
            try:
                records += decoder.decode(raw)
            except (PayloadError, struct.error):
                at = raw.start
                reader.problem = reader.problem or f"the record at byte {at:,} is malformed"
    records.sort(key=_BY_TIME)
    return records


class _Decoder:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._data = reader.data

    def decode(self, raw: RawRecord) -> Iterator[Record]:
        cursor = Cursor(self._data, raw.start, raw.end)
        if raw.type == SAMPLE:
            yield self._sample(raw, cursor)
            return
        time_ns, event = self._trailer(cursor)
        if raw.type in (MMAP, MMAP2):
            yield from _mapping(raw, cursor, time_ns)
        elif raw.type == COMM:
            pid, tid = cursor.u32(), cursor.u32()
            yield Comm(time_ns, pid, tid, cursor.name(), bool(raw.misc & _COMM_EXEC))
        elif raw.type == FORK:
            pid, parent, tid, parent_tid = (cursor.u32() for _ in range(4))
            yield Fork(time_ns, pid, tid, parent, parent_tid)
        elif raw.type == KSYMBOL:
            start, length, _ = cursor.u64(), cursor.u32(), cursor.u32()
            yield Ksymbol(time_ns, start, start + length, cursor.name())
        elif raw.type == LOST:
            lost_id, count = cursor.u64(), cursor.u64()
            event = self._reader.file.attr_by_id.get(lost_id, event)
            yield Loss(time_ns, event, count, is_samples=False)
        elif raw.type == LOST_SAMPLES:
            yield Loss(time_ns, event, cursor.u64(), is_samples=True)
        else:
            yield Throttle(time_ns)

    def _trailer(self, cursor: Cursor) -> tuple[int, int]:
        """Returns a record's trailing time and event index, and removes them from the cursor."""
        attrs = self._reader.file.attrs
        if not attrs or not attrs[0].has_ids:
            return NO_TIME, 0
        kind = attrs[0].sample_type
        sizes = [_TID, _TIME, _ID, _STREAM_ID, _CPU, _IDENTIFIER]
        present = [flag for flag in sizes if kind & flag]
        start = cursor.end - 8 * len(present)
        words = Cursor(cursor.data, max(start, cursor.position), cursor.end)
        values = {flag: words.u64() for flag in present}
        cursor.end = start
        _check_range(values.get(_TIME, 0))
        event_id = values.get(_IDENTIFIER, values.get(_ID, 0))
        return values.get(_TIME, NO_TIME), self._reader.file.attr_by_id.get(event_id, 0)

    def _event(self, cursor: Cursor) -> int:
        file = self._reader.file
        if not file.attrs:
            raise PayloadError("a sample precedes the attributes of its event")
        if len(file.attrs) == 1:
            return 0
        if file.attrs[0].sample_type & _IDENTIFIER:
            return file.attr_by_id.get(_word(cursor, 0), 0)
        kind = file.attrs[0].sample_type
        if not kind & _ID:
            return 0
        return file.attr_by_id.get(
            _word(cursor, sum(bool(kind & flag) for flag in (_IP, _TID, _TIME, _ADDR))), 0
        )

    def _sample(self, raw: RawRecord, cursor: Cursor) -> Sample:
        event = self._event(cursor)
        attr = self._reader.file.attrs[event]
        kind = attr.sample_type
        if kind & _IDENTIFIER:
            cursor.skip(8)
        chain = cursor.take(8) if kind & _IP else b""
        pid, tid = (cursor.u32(), cursor.u32()) if kind & _TID else (0, 0)
        time_ns = cursor.u64() if kind & _TIME else NO_TIME
        cursor.skip(8 * sum(bool(kind & flag) for flag in (_ADDR, _ID, _STREAM_ID)))
        cpu = cursor.u64() & 0xFFFFFFFF if kind & _CPU else 0
        period = cursor.u64() if kind & _PERIOD else attr.period
        _check_range(time_ns, period)
        if kind & _READ:
            _skip_counts(attr, cursor)
        if kind & _CALLCHAIN:
            chain = cursor.take(8 * cursor.u64()) or chain
        return Sample(time_ns, event, pid, tid, cpu, period, raw.misc & _MODE_MASK, chain)


def _check_range(*numbers: int) -> None:
    if max(numbers) >> 63:
        raise PayloadError("a time or a count exceeds the range of 64-bit integers")


def _word(cursor: Cursor, index: int) -> int:
    return Cursor(cursor.data, cursor.position + 8 * index, cursor.end).u64()


def _skip_counts(attr: EventAttr, cursor: Cursor) -> None:
    """Skips a sample's ``struct read_format``."""
    form = attr.read_format
    times = sum(bool(form & flag) for flag in (_ENABLED, _RUNNING))
    words = 1 + sum(bool(form & flag) for flag in (_FORMAT_ID, _FORMAT_LOST))
    count = cursor.u64() if form & _GROUP else 1
    cursor.skip(8 * (times + words * count))


def _mapping(raw: RawRecord, cursor: Cursor, time_ns: int) -> Iterator[FileMapping]:
    pid, _, start, length, offset = (
        cursor.u32(), cursor.u32(), cursor.u64(), cursor.u64(), cursor.u64(),
    )  # fmt: skip
    build_id = ""
    if raw.type == MMAP2:
        identity = cursor.take(24)
        if raw.misc & _MMAP_BUILD_ID:
            build_id = identity[4 : 4 + min(identity[0], 20)].hex()
        is_executable = bool(cursor.u32() & _EXECUTABLE)
        cursor.skip(4)  # flags
    else:
        is_executable = not raw.misc & _MMAP_DATA
    if is_executable or raw.misc & _MODE_MASK == KERNEL_MODE:
        owner = -1 if raw.misc & _MODE_MASK == KERNEL_MODE else pid
        yield FileMapping(time_ns, owner, start, start + length, offset, cursor.name(), build_id)
