"""Streams process events (start, exec, mapped code, exit) in time order.

A perf event on each CPU receives a record of each process event on that CPU. Processes that are
already running are read from ``/proc``. Example::

    from otel_kprofiler.tracking import Mapped, ProcessEvents

    with ProcessEvents() as events:
        for event in events.follow():
            if isinstance(event, Mapped):
                print(event.process.tgid, event.mapping.path)
"""

import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Final, Self

from otel_kprofiler import forks
from otel_kprofiler.forks import ForkAware, ForkStep
from otel_kprofiler.host import (
    TICK_NS,
    Access,
    HostFiles,
    MemoryMapping,
    find_descendants,
    parse_mappings,
    parse_stat,
    read_maps,
    read_processes,
)
from otel_kprofiler.model import ProcessKey
from otel_kprofiler.tracking.ksymbol_records import LostRecord
from otel_kprofiler.tracking.process_records import (
    PROCESSES,
    ExecRecord,
    MapRecord,
    TaskRecord,
    is_file_or_vdso,
    parse_process_records,
)
from otel_kprofiler.tracking.process_table import (
    Absent,
    Census,
    Lost,
    ProcessEvent,
    ProcessTable,
    Reading,
)
from otel_kprofiler.tracking.record_events import SETTLE_NS, RecordEvents, RecordLoss

INTERVAL_S: Final = 0.1
FOLLOW_INTERVAL_NS: Final = 1_000_000_000
MAX_PENDING: Final = 100_000
"""Maximum number of records waiting to be sorted, about 30 MB. Excess records are lost."""
MAX_READ_AGAIN: Final = 3
"""Maximum number of times that a process is read if it changes during each read."""
SAME_START_NS: Final = 50_000_000 + TICK_NS
_TIME: Final = attrgetter("time_ns")

_Pending = TaskRecord | ExecRecord | MapRecord | Reading | Absent | Census | Lost


class ProcessEvents(ForkAware):
    """Streams process events until closed. Not thread-safe.

    Every process that exists when the stream is opened is reported as ``Started`` and ``Mapped``;
    later changes are reported once, in order. Events are delayed by a few milliseconds, so that
    events from all CPUs can be sorted. If the kernel's buffers fill up between calls to
    :meth:`poll`, or a CPU comes online, ``Lost`` is reported, and all processes are read again. In
    a forked child, the stream is closed.

    Args:
        pids: ids of the processes to report; empty for all.
        children: whether to also report all descendants of ``pids``.
        ring_bytes: size of each CPU's kernel buffer; the number of pages is a power of two. None
            selects a size that any user may lock: 512 KiB, or less on hosts with more than 16 CPUs.

    Raises:
        HostError: the kernel refuses to open the events, which require CAP_PERFMON. Without
            CAP_SYS_PTRACE, events for existing mappings of other users' processes are missing.
    """

    def __init__(
        self,
        pids: Collection[int] = (),
        *,
        children: bool = False,
        files: HostFiles | None = None,
        ring_bytes: int | None = None,
    ) -> None:
        self._files = files or Access()
        self._table = ProcessTable(pids, children=children, same_start_ns=SAME_START_NS)
        self._pending: list[_Pending] = []
        self._lost: Counter[RecordLoss] = Counter()
        self._lost_since_ns = 0
        self._polled_ns = self._followed_ns = _now_ns()
        self._closed = False
        self._events = RecordEvents(self._files, PROCESSES, ring_bytes, self._lose)
        forks.register(ForkStep.RELEASE, self)
        self._take_census()

    def poll(self) -> list[ProcessEvent]:
        """Returns the events since the last call, in time order; never waits.

        Raises ``OSError`` if processes must be reread, but ``/proc`` cannot be read.
        """
        if self._closed:
            return []
        self._events.epoll.poll(0)  # consumes a pending wakeup
        now_ns = _now_ns()
        self._drain(now_ns)
        if self._lost_since_ns:
            lost = Lost(self._lost_since_ns, _now_ns())
            self._lost_since_ns = 0
            self._pending = [record for record in self._pending if record.time_ns < lost.since_ns]
            self._pending.append(lost)
            self._take_census()
        self._polled_ns = now_ns
        return self._release(now_ns - SETTLE_NS)

    def follow(self, interval_s: float = INTERVAL_S) -> Iterator[ProcessEvent]:
        """Yields events until the stream is closed.

        The kernel's buffers are emptied at intervals of ``interval_s``, or earlier if half full.
        """
        while not self._closed:
            yield from self.poll()
            if not self._closed:
                self._events.epoll.poll(interval_s)

    def fileno(self) -> int:
        """Returns a descriptor for epoll(7) that is readable when a buffer is half full."""
        return self._events.epoll.fileno()

    def mappings(self, pid: int) -> tuple[MemoryMapping, ...]:
        """Returns a process's executable mappings as of the last returned event."""
        return self._table.mappings(pid)

    def add(self, pid: int) -> None:
        """Start reporting a process (no effect if all processes are reported)."""
        if not self._table.takes_all:
            self._table.wanted.add(pid)
            self._read_wanted([pid])

    def discard(self, pid: int) -> None:
        """Stop reporting a process (no effect if all processes are reported)."""
        if not self._table.takes_all:
            self._table.discard(pid)

    def refresh(self, pid: int) -> None:
        """Reread a process's maps, so that the next polls report unmapped code."""
        if self._table.wants(pid):
            self._read_until_quiet([pid])

    def count_lost(self) -> Mapping[str, int]:
        """Returns the number of lost records by cause, counting a loss of unknown size as one."""
        return Counter({cause.value: count for cause, count in self._lost.items()})

    def close(self) -> None:
        """Close the events; idempotent."""
        if not self._closed:
            self._closed = True
            forks.unregister(self)
            self._events.close()

    def after_fork_in_child(self) -> None:
        """Close the events, which belong to the parent."""
        self.close()

    def __enter__(self) -> Self:
        """Returns the stream."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the events."""
        self.close()

    def _drain(self, now_ns: int) -> None:
        for cpu, data in self._events.take():
            records, damaged = parse_process_records(data)
            if damaged:
                self._lose(RecordLoss.DAMAGED, cpu, 0)
            for record in records:
                if isinstance(record, LostRecord):
                    self._events.note_lost_record(cpu, record.lost)
                else:
                    self._pending.append(record)
        if len(self._pending) > MAX_PENDING:
            self._lose(RecordLoss.QUEUE_FULL, 0, len(self._pending))
        if now_ns - self._followed_ns > FOLLOW_INTERVAL_NS:
            self._events.follow()
            self._followed_ns = now_ns

    def _lose(self, cause: RecordLoss, _cpu: int, count: int) -> None:
        self._lost[cause] += max(count, 1)
        since_ns = self._followed_ns if cause is RecordLoss.CPU_CAME else self._polled_ns
        self._lost_since_ns = min(self._lost_since_ns or since_ns, since_ns)

    def _release(self, until_ns: int) -> list[ProcessEvent]:
        self._pending.sort(key=_TIME)  # stable: preserves the order of each CPU's records
        events: list[ProcessEvent] = []
        count = 0
        for count, record in enumerate(self._pending, 1):
            if record.time_ns > until_ns:
                count -= 1  # noqa: PLW2901
                break
            events += [record] if isinstance(record, Lost) else self._table.apply(record)
        del self._pending[:count]
        return events

    def _take_census(self) -> None:
        time_ns = _now_ns()
        pids = frozenset(int(name) for name in self._files.list_dir("/proc") if name.isdecimal())
        self._pending.append(Census(time_ns, pids))
        if self._table.takes_all:
            self._read_until_quiet(sorted(pids))
        else:
            self._read_wanted(self._table.wanted & pids)

    def _read_wanted(self, pids: Collection[int]) -> None:
        """Read the selected processes, and their existing children if children are reported."""
        if self._table.takes_children:
            children = find_descendants(read_processes(self._files), pids)
            self._table.wanted |= children
            pids = children.union(pids)
        self._read_until_quiet(sorted(pids))

    def _read_until_quiet(self, pids: Iterable[int]) -> None:
        """Read processes, and reread those that, according to records, changed during the read."""
        for _ in range(MAX_READ_AGAIN):
            readings = [reading for pid in pids if (reading := self._read(pid))]
            if not readings:
                return
            ended = {reading.process.tgid: ended_ns for reading, ended_ns in readings}
            began = {reading.process.tgid: reading.time_ns for reading, _ in readings}
            time.sleep(SETTLE_NS / 1e9)
            self._drain(_now_ns())
            changed = {
                record.pid
                for record in self._pending
                if isinstance(record, TaskRecord | ExecRecord | MapRecord)
                and record.pid in began
                and began[record.pid] <= record.time_ns <= ended[record.pid]
            }
            self._pending += [
                reading for reading, _ in readings if reading.process.tgid not in changed
            ]
            pids = sorted(changed)
        self._pending += [reading for reading, _ in readings if reading.process.tgid in changed]

    def _read(self, pid: int) -> tuple[Reading, int] | None:
        """Returns a process's state and the time after reading it; None on failure."""
        time_ns = _now_ns()
        try:
            stat = parse_stat(self._files.read_bytes(f"/proc/{pid}/stat"))
            threads = self._files.list_dir(f"/proc/{pid}/task")
        except (FileNotFoundError, ProcessLookupError):
            self._pending.append(Absent(_now_ns(), pid))
            return None
        except (OSError, ValueError):
            return None
        mappings: tuple[MemoryMapping, ...] = ()
        with suppress(OSError):  # no permission, or the process exited and its exit record follows
            mappings = tuple(
                mapping if is_file_or_vdso(os.fsencode(mapping.path)) else mapping._replace(path="")
                for mapping in parse_mappings(read_maps(self._files, pid))
                if mapping.is_executable and mapping.path != "[vsyscall]"
            )
        process = ProcessKey(pid, stat.start_ticks * TICK_NS)
        reading = Reading(time_ns, process, frozenset(map(int, threads)), mappings)
        return reading, _now_ns()


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
