"""Parses the kernel's announcements of loaded code (ksymbol records) from a perf ring.

Formats: include/uapi/linux/perf_event.h (``PERF_RECORD_KSYMBOL``, ``_BPF_EVENT``, ``_LOST``,
``struct perf_event_mmap_page``). Record types that are not listed here are ignored.
"""

import mmap
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from otel_kprofiler.bpf import Fence
from otel_kprofiler.model import Ksymbol, KsymbolAction, KsymbolChange, ModuleKind

PROGRAM_PREFIX: Final = "bpf_prog_"
"""Name prefix of BPF program functions. The program's tag follows the prefix."""
PROGRAM_LOADED: Final = 1

_LOST: Final = 2
_KSYMBOL: Final = 17
_BPF_EVENT: Final = 18
_KINDS: Final = {1: ModuleKind.BPF, 2: ModuleKind.OUT_OF_LINE}  # enum perf_record_ksymbol_type
_UNREGISTER: Final = 1

_HEADER: Final = struct.Struct("=IHH")  # type, misc, size
_KSYMBOL_BODY: Final = struct.Struct("=QIHH")  # address, length, type, flags; then the name
_BPF_BODY: Final = struct.Struct("=HHI8s")  # event, flags, program id, tag
_LOST_BODY: Final = struct.Struct("=QQ")  # event id, number
_TIME: Final = struct.Struct("=Q")

_HEAD, _TAIL = 128, 129  # 64-bit words of the control page


class KsymbolRecord(NamedTuple):
    """Code that was registered, or unregistered if ``removed`` is set."""

    time_ns: int
    start: int
    length: int
    kind: ModuleKind
    removed: bool
    name: str


class ProgramRecord(NamedTuple):
    """A BPF program was loaded or unloaded (``event``).

    The records for the program's functions precede this record.
    """

    time_ns: int
    event: int
    id: int
    tag: str


class LostRecord(NamedTuple):
    """Reports how many preceding records did not fit into the ring."""

    time_ns: int
    lost: int


PerfRecord = KsymbolRecord | ProgramRecord | LostRecord


class PerfRecords(NamedTuple):
    """Records in stream order; ``damaged`` is set if parsing stopped at invalid bytes."""

    records: list[PerfRecord]
    damaged: bool


def parse_perf_records(data: bytes, *, timed: bool = True) -> PerfRecords:
    """Parse records of the types in ``PerfRecord``, skipping other records; never raises.

    If ``timed``, a record's fields are followed by a time (``sample_id_all`` with only
    ``PERF_SAMPLE_TIME``); otherwise, times are 0. Records may have padding after the time: for each
    additional event on the same CPU, the kernel makes the record eight bytes longer than its data
    (``perf_event_ksymbol_output`` and ``perf_event_bpf_output`` in kernel/events/core.c).
    """
    records: list[PerfRecord] = []
    at, end = 0, len(data)
    while at < end:
        if end - at < _HEADER.size:
            return PerfRecords(records, damaged=True)
        kind, _, size = _HEADER.unpack_from(data, at)
        body, at = at + _HEADER.size, at + size
        if at > end or at < body:
            return PerfRecords(records, damaged=True)
        record = _parse_record(kind, data[body:at], timed=timed)
        if record is not None:
            records.append(record)
    return PerfRecords(records, damaged=False)


def _parse_record(kind: int, body: bytes, *, timed: bool) -> PerfRecord | None:
    """Parse a record's body; None if the type is ignored or the body is too short."""
    length = len(body)
    if kind == _KSYMBOL and length > _KSYMBOL_BODY.size:
        start, size, code, flags = _KSYMBOL_BODY.unpack_from(body)
        end = body.find(b"\0", _KSYMBOL_BODY.size)
        stop = (end | 7) + 1  # names are padded
        if end <= _KSYMBOL_BODY.size or code not in _KINDS or stop + 8 * timed > length:
            return None
        time_ns = _TIME.unpack_from(body, stop)[0] if timed else 0
        name = body[_KSYMBOL_BODY.size : end].decode("utf-8", "backslashreplace")
        removed = bool(flags & _UNREGISTER)
        return KsymbolRecord(time_ns, start, size, _KINDS[code], removed, name)
    if kind in (_BPF_EVENT, _LOST) and length >= _BPF_BODY.size + 8 * timed:
        time_ns = _TIME.unpack_from(body, _BPF_BODY.size)[0] if timed else 0
        if kind == _LOST:
            return LostRecord(time_ns, _LOST_BODY.unpack_from(body)[1])
        event, _, number, tag = _BPF_BODY.unpack_from(body)
        return ProgramRecord(time_ns, event, number, tag.hex())
    return None


def make_changes(records: Iterable[PerfRecord]) -> list[KsymbolChange]:
    """Convert one CPU's records, given in stream order, to ksymbol changes."""
    changes: list[KsymbolChange] = []
    added: list[KsymbolRecord] = []  # functions whose program record has not arrived yet
    for record in records:
        if isinstance(record, KsymbolRecord):
            if record.name.startswith(PROGRAM_PREFIX) and not record.removed:
                added.append(record)
            else:
                changes.append(_make_change(record, 0))
        elif isinstance(record, ProgramRecord) and record.event == PROGRAM_LOADED:
            mark = PROGRAM_PREFIX + record.tag
            first = max((i for i, r in enumerate(added) if r.name.startswith(mark)), default=0)
            changes += [_make_change(r, 0) for r in added[:first]]
            changes += [_make_change(r, record.id) for r in added[first:]]
            added = []
    return changes + [_make_change(r, 0) for r in added]


def _make_change(record: KsymbolRecord, program_id: int) -> KsymbolChange:
    time_ns, start, length, kind, removed, name = record
    action = KsymbolAction.REMOVED if removed else KsymbolAction.ADDED
    symbol = Ksymbol(start, length, name, kind, 0 if removed else time_ns, program_id)
    return KsymbolChange(time_ns, action, (symbol,))


class PerfChunk(NamedTuple):
    """Contents of a ring; ``was_full`` is set if another record might not have fit."""

    data: bytes
    was_full: bool


class PerfMemory:
    """The mapped pages of an event's ring. Tests replace this class."""

    def __init__(self, fd: int, size: int) -> None:
        # If the mapping is writable, the kernel drops new records instead of unread records.
        self._mapped = mmap.mmap(fd, mmap.PAGESIZE + size)
        self.control = memoryview(self._mapped)[: mmap.PAGESIZE].cast("Q")
        self.data = memoryview(self._mapped)[mmap.PAGESIZE :]

    def close(self) -> None:
        """Unmap the memory."""
        self.control.release()
        self.data.release()
        self._mapped.close()


class PerfRing:
    """Reads the ring of a perf event; not thread-safe.

    The size of the ring is ``size`` bytes, a power of two. A record occupies at most ``largest``
    bytes.
    """

    def __init__(self, memory: PerfMemory, size: int, largest: int = 1024) -> None:
        self._memory = memory
        self._size = size
        self._largest = largest
        self._order = Fence()

    def take(self) -> PerfChunk:
        """Remove and return everything in the ring."""
        control, data, size = self._memory.control, self._memory.data, self._size
        tail, head = control[_TAIL], control[_HEAD]
        if head == tail:
            return PerfChunk(b"", was_full=False)
        self._order()
        used = head - tail
        if not 0 < used <= size:  # invalid positions: nothing in the ring can be trusted
            control[_TAIL] = head
            return PerfChunk(b"", was_full=True)
        first = tail & (size - 1)
        taken = bytes(data[first : min(first + used, size)])
        taken += bytes(data[: used - len(taken)])
        self._order()
        control[_TAIL] = head
        return PerfChunk(taken, used > size - self._largest)

    def close(self) -> None:
        """Unmap the ring."""
        self._memory.close()
