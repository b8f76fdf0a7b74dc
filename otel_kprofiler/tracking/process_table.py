"""Tracks processes' programs and mappings, using kernel records and ``/proc``.

Performs no I/O: accepts records and :class:`Reading` objects in time order, and returns events.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from otel_kprofiler.host import MemoryMapping
from otel_kprofiler.model import BuildId, ProcessKey
from otel_kprofiler.tracking.process_records import ExecRecord, MapRecord, TaskRecord


class Started(NamedTuple):
    """A process started, or was already running when the stream started or recovered from a loss.

    A forked process inherits its parent's mappings, for which no events are generated.

    Attributes:
        time_ns: boottime of the event.
        process: pid and start time. The start time of a forked process is ``time_ns``, a few
            milliseconds later than in ``/proc``. For a process that was already running, the start
            time is from ``/proc``.
        parent: pid of the parent; None if the process was already running.
    """

    time_ns: int
    process: ProcessKey
    parent: int | None


class Exec(NamedTuple):
    """A process executed a program, which removed all earlier mappings.

    ``name`` is the new name in the kernel: the first 15 bytes of the program's name.
    """

    time_ns: int
    process: ProcessKey
    name: str


class Mapped(NamedTuple):
    """A process mapped code from a file, or anonymous executable memory (without a path).

    If the kernel merged adjacent mappings, the event contains the resulting mapping, which replaces
    the merged mappings.

    Attributes:
        mapping: the mapping; device and inode are 0 if the kernel reports the build id instead.
        build_id: build id of the file, from kernel 5.12 on; None if the file has no build id, or if
            the code was mapped before the stream started.
    """

    time_ns: int
    process: ProcessKey
    mapping: MemoryMapping
    build_id: BuildId | None


class Unmapped(NamedTuple):
    """Code is no longer mapped.

    The kernel does not report unmapping. An unmapping is detected when other code is mapped at the
    address, or by rereading the maps (``refresh``); until then, the mapping is treated as present.

    Attributes:
        time_ns: boottime of detection; the mapping may have been removed long before.
        mapping: the removed mapping; ranges that remain mapped are reported as ``Mapped``.
    """

    time_ns: int
    process: ProcessKey
    mapping: MemoryMapping


class Exited(NamedTuple):
    """The last thread of a process has exited."""

    time_ns: int
    process: ProcessKey


class Lost(NamedTuple):
    """Events may be missing between two boottimes.

    After a loss, all processes are reread, and changes are reported as events with the time of the
    read. If a process called execve(2) in this interval, only its changed mappings are reported.
    """

    since_ns: int
    time_ns: int


ProcessEvent = Started | Exec | Mapped | Unmapped | Exited | Lost


class Reading(NamedTuple):
    """A process as read from ``/proc``; ``time_ns`` is the ``CLOCK_BOOTTIME`` before the read."""

    time_ns: int
    process: ProcessKey
    threads: frozenset[int]
    mappings: tuple[MemoryMapping, ...]


class Census(NamedTuple):
    """All processes that existed at ``time_ns`` (boottime)."""

    time_ns: int
    pids: frozenset[int]


class Absent(NamedTuple):
    """A process that could no longer be read at ``time_ns`` (boottime).

    No record reports the exit of a process that exited before the stream started. The pid may have
    been reused.
    """

    time_ns: int
    pid: int


class _Process:
    __slots__ = ("key", "mappings", "threads")

    def __init__(
        self, key: ProcessKey, threads: Iterable[int], mappings: tuple[MemoryMapping, ...]
    ) -> None:
        self.key = key
        self.threads = set(threads)
        self.mappings = mappings  # sorted by address; forked children share the tuple


class ProcessTable:
    """Tracks the processes in ``pids``, and their descendants if ``children`` is set.

    Not thread-safe. If ``pids`` is empty, all processes are tracked. A process's start time in the
    records may be up to ``same_start_ns`` later than in ``/proc``.
    """

    def __init__(
        self, pids: Collection[int] = (), *, children: bool = False, same_start_ns: int = 0
    ) -> None:
        self.wanted = set(pids)
        self.takes_all = not pids
        self.takes_children = children
        self._same_start_ns = same_start_ns
        self._processes: dict[int, _Process] = {}

    def pids(self) -> list[int]:
        """Returns the tracked processes."""
        return list(self._processes)

    def mappings(self, pid: int) -> tuple[MemoryMapping, ...]:
        """Returns the code mappings of a process, by address; empty for unknown processes."""
        process = self._processes.get(pid)
        return process.mappings if process else ()

    def wants(self, pid: int) -> bool:
        """Returns whether a process is selected."""
        return self.takes_all or pid in self.wanted

    def apply(
        self, change: TaskRecord | ExecRecord | MapRecord | Reading | Absent | Census
    ) -> list[ProcessEvent]:
        """Apply a change, and return the resulting events."""
        match change:
            case TaskRecord():
                return self._end_thread(change) if change.ended else self._begin(change)
            case ExecRecord():
                return self._exec(change)
            case MapRecord():
                return self._map(change)
            case Reading():
                return self._read(change)
            case Absent(time_ns, pid):
                self.wanted.discard(pid)
                return self._forget_all([pid], time_ns)
            case Census(time_ns, pids):
                return self._forget_all(self._processes.keys() - pids, time_ns)

    def discard(self, pid: int) -> None:
        """Forget a process without reporting an event."""
        self.wanted.discard(pid)
        self._processes.pop(pid, None)

    def _begin(self, record: TaskRecord) -> list[ProcessEvent]:
        time_ns, pid, parent_pid, tid, _ = record
        tracked = self._processes.get(pid)
        if tid != pid:
            if tracked is not None:
                tracked.threads.add(tid)
            return []
        if self.takes_children and parent_pid in self.wanted:
            self.wanted.add(pid)
        if not self.wants(pid):
            return []
        events = []
        if tracked is not None:
            if time_ns <= (tracked.key.start_time_ns or 0) + self._same_start_ns:
                return []  # the process was read from /proc before its record arrived
            events = self._forget(pid, time_ns)
        process = ProcessKey(pid, time_ns)
        self._processes[pid] = _Process(process, [tid], self.mappings(parent_pid))
        return [*events, Started(time_ns, process, parent_pid)]

    def _end_thread(self, record: TaskRecord) -> list[ProcessEvent]:
        process = self._processes.get(record.pid)
        if process is None:
            return []
        process.threads.discard(record.tid)
        return [] if process.threads else self._forget(record.pid, record.time_ns)

    def _forget_all(self, pids: Iterable[int], time_ns: int) -> list[ProcessEvent]:
        running = sorted(self._processes.keys() & pids)
        return [event for pid in running for event in self._forget(pid, time_ns)]

    def _forget(self, pid: int, time_ns: int) -> list[ProcessEvent]:
        if not self.takes_all:
            self.wanted.discard(pid)
        return [Exited(time_ns, self._processes.pop(pid).key)]

    def _exec(self, record: ExecRecord) -> list[ProcessEvent]:
        process = self._processes.get(record.pid)
        if process is None:
            return []
        process.threads = {record.pid}  # the kernel has terminated the other threads
        process.mappings = ()
        return [Exec(record.time_ns, process.key, record.name)]

    def _map(self, record: MapRecord) -> list[ProcessEvent]:
        process = self._processes.get(record.pid)
        if process is None:
            return []
        time_ns, _, mapping, build_id = record
        if any(is_same(old, mapping) for old in process.mappings):
            return []
        events: list[ProcessEvent] = []
        kept = [mapping]
        for old in process.mappings:
            if old.end <= mapping.start or mapping.end <= old.start:
                kept.append(old)
            elif not _continues(old, mapping):
                events.append(Unmapped(time_ns, process.key, old))
                parts = _cut_out(old, mapping)
                kept += parts
                events += [Mapped(time_ns, process.key, part, None) for part in parts]
        process.mappings = tuple(sorted(kept))
        return [*events, Mapped(time_ns, process.key, mapping, build_id)]

    def _read(self, reading: Reading) -> list[ProcessEvent]:
        time_ns, process, threads, mappings = reading
        if not self.wants(process.tgid):
            return []
        events: list[ProcessEvent] = []
        tracked = self._processes.get(process.tgid)
        if tracked is not None and not self._is_same_start(tracked.key, process):
            events = self._forget(process.tgid, time_ns)
            tracked = None
            if not self.takes_all:
                self.wanted.add(process.tgid)
        if tracked is None:
            tracked = self._processes[process.tgid] = _Process(process, (), ())
            events.append(Started(time_ns, process, None))
        tracked.threads = set(threads)
        events += [
            Unmapped(time_ns, tracked.key, old)
            for old in tracked.mappings
            if not any(is_same(old, other) for other in mappings)
        ]
        events += [
            Mapped(time_ns, tracked.key, new, None)
            for new in mappings
            if not any(is_same(new, other) for other in tracked.mappings)
        ]
        tracked.mappings = tuple(sorted(mappings))
        return events

    def _is_same_start(self, tracked: ProcessKey, read: ProcessKey) -> bool:
        distance = (tracked.start_time_ns or 0) - (read.start_time_ns or 0)
        return 0 <= distance <= self._same_start_ns


def is_same(first: MemoryMapping, other: MemoryMapping) -> bool:
    """Returns whether mappings are equal in the fields common to mmap records and ``maps``."""
    return (first.start, first.end, first.file_offset, first.path) == (
        other.start, other.end, other.file_offset, other.path,
    )  # fmt: skip


def _continues(shorter: MemoryMapping, longer: MemoryMapping) -> bool:
    """Returns whether a mapping has become part of a longer mapping of the same file."""
    is_inside = longer.start <= shorter.start and shorter.end <= longer.end
    shift = (
        shorter.file_offset - shorter.start == longer.file_offset - longer.start or not shorter.path
    )
    return is_inside and shift and shorter.path == longer.path


def _cut_out(mapping: MemoryMapping, hole: MemoryMapping) -> list[MemoryMapping]:
    """Returns the parts of a mapping that remain outside a hole."""
    parts = []
    if mapping.start < hole.start:
        parts.append(mapping._replace(end=hole.start))
    if hole.end < mapping.end:
        offset = mapping.file_offset + (hole.end - mapping.start if mapping.path else 0)
        parts.append(mapping._replace(start=hole.end, file_offset=offset))
    return parts
