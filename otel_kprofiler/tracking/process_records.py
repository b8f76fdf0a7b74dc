"""Parses the kernel's process event records from a perf ring.

Formats: include/uapi/linux/perf_event.h (``PERF_RECORD_FORK``, ``_EXIT``, ``_COMM``, ``_MMAP2``,
``_LOST``). The last eight bytes of each record contain its timestamp.
"""

import os
import struct
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from otel_kprofiler.host import MemoryMapping
from otel_kprofiler.model import VDSO_NAME, BuildId
from otel_kprofiler.tracking.ksymbol_records import LostRecord
from otel_kprofiler.tracking.record_events import WantedRecords

# Bits of struct perf_event_attr: mmap, comm, task, mmap2, comm_exec; build_id (kernel 5.12)
_FLAGS: Final = 1 << 8 | 1 << 9 | 1 << 13 | 1 << 23 | 1 << 24
PROCESSES: Final = WantedRecords("processes", _FLAGS, 4096 + 256, 1 << 34)

_LOST, _COMM, _EXIT, _FORK, _MMAP2 = 2, 3, 4, 7, 10
_IS_EXEC: Final = 1 << 13  # bits of the misc field
_HAS_BUILD_ID: Final = 1 << 14
_DELETED: Final = b" (deleted)"

_HEADER: Final = struct.Struct("=IHH")  # type, misc, size
_TASK: Final = struct.Struct("=IIIIQ")  # pid, parent's pid, tid, parent's tid, time
_COMM_HEAD: Final = struct.Struct("=II")  # pid, tid; then the name
# pid, tid, start, size, offset, file, protection, flags; then the name
_MMAP2_HEAD: Final = struct.Struct("=IIQQQ24sII")
_FILE: Final = struct.Struct("=IIQ8x")  # major, minor, inode
_LOST_BODY: Final = struct.Struct("=QQ")
_TIME: Final = struct.Struct("=Q")
_LETTERS: Final = ((1, "r"), (2, "w"), (4, "x"))
_MAP_SHARED: Final = 1


class TaskRecord(NamedTuple):
    """A thread of process ``pid`` started or exited. ``parent`` is the parent's pid."""

    time_ns: int
    pid: int
    parent: int
    tid: int
    ended: bool


class ExecRecord(NamedTuple):
    """A process executed a program; ``name`` is the new name of the process in the kernel."""

    time_ns: int
    pid: int
    name: str


class MapRecord(NamedTuple):
    """A process mapped executable memory."""

    time_ns: int
    pid: int
    mapping: MemoryMapping
    build_id: BuildId | None


ProcessRecord = TaskRecord | ExecRecord | MapRecord | LostRecord


class ProcessRecords(NamedTuple):
    """Records in stream order; ``damaged`` is true if parsing stopped at invalid bytes."""

    records: list[ProcessRecord]
    damaged: bool


def parse_process_records(data: bytes) -> ProcessRecords:
    """Parse process event records, skipping other records; never raises."""
    records: list[ProcessRecord] = []
    at, end = 0, len(data)
    while at < end:
        if end - at < _HEADER.size:
            return ProcessRecords(records, damaged=True)
        kind, misc, size = _HEADER.unpack_from(data, at)
        if size < _HEADER.size or at + size > end:
            return ProcessRecords(records, damaged=True)
        body = data[at + _HEADER.size : at + size]
        at += size
        parse = _PARSERS.get(kind)
        if parse is not None:
            try:
                record = parse(body, misc)
            except struct.error:
                return ProcessRecords(records, damaged=True)
            if record is not None:
                records.append(record)
    return ProcessRecords(records, damaged=False)


def _parse_task(body: bytes, _: int, *, ended: bool) -> TaskRecord:
    pid, parent, tid, _, time_ns = _TASK.unpack_from(body)
    return TaskRecord(time_ns, pid, parent, tid, ended)


def _parse_comm(body: bytes, misc: int) -> ExecRecord | None:
    if not misc & _IS_EXEC:
        return None
    pid, _ = _COMM_HEAD.unpack_from(body)
    name = _cut(body, _COMM_HEAD.size).decode("utf-8", "backslashreplace")
    return ExecRecord(_time(body), pid, name)


def _parse_mmap(body: bytes, misc: int) -> MapRecord | None:
    pid, _, start, size, offset, file, protection, flags = _MMAP2_HEAD.unpack_from(body)
    permissions = "".join(letter if protection & bit else "-" for bit, letter in _LETTERS)
    if "x" not in permissions or not size:
        return None
    major = minor = inode = 0
    build_id = None
    if misc & _HAS_BUILD_ID:
        build_id = BuildId(file[4 : 4 + min(file[0], 20)].hex()) if file[0] else None
    else:
        major, minor, inode = _FILE.unpack(file)
    shown = _cut(body, _MMAP2_HEAD.size)
    if not is_file_or_vdso(shown):
        shown = b""
        offset = 0
    path = shown.removesuffix(_DELETED)
    mapping = MemoryMapping(
        start, start + size, permissions + ("s" if flags & _MAP_SHARED else "p"), offset,
        major << 20 | minor, inode, os.fsdecode(path), path != shown,
    )  # fmt: skip
    return MapRecord(_time(body), pid, mapping, build_id)


def is_file_or_vdso(shown: bytes) -> bool:
    """Returns whether mmap records and ``/proc/PID/maps`` show the same name for a mapping."""
    return shown == VDSO_NAME.encode() or (shown.startswith(b"/") and not shown.startswith(b"//"))


def _parse_lost(body: bytes, _: int) -> LostRecord:
    return LostRecord(_time(body), _LOST_BODY.unpack_from(body)[1])


def _time(body: bytes) -> int:
    time_ns: int = _TIME.unpack_from(body, max(len(body) - _TIME.size, 0))[0]
    return time_ns


def _cut(body: bytes, at: int) -> bytes:
    """Extracts a zero-terminated string from a record that ends with a timestamp."""
    return body[at : max(len(body) - _TIME.size, at)].partition(b"\0")[0]


_PARSERS: Final[dict[int, Callable[[bytes, int], ProcessRecord | None]]] = {
    _FORK: partial(_parse_task, ended=False),
    _EXIT: partial(_parse_task, ended=True),
    _COMM: _parse_comm,
    _MMAP2: _parse_mmap,
    _LOST: _parse_lost,
}
