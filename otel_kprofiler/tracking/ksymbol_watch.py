"""Tracks kernel code outside vmlinux and modules: BPF programs, trampolines, kprobe pages.

A perf event on each CPU receives a record for each symbol that the CPU loads. ``poll`` empties the
rings. After the first poll, a thread drains half-full rings, handles CPU hotplug, and rereads
all symbols after records have been lost.
"""

import contextlib
import logging
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Mapping
from operator import attrgetter
from typing import Final, NamedTuple

from otel_kprofiler import forks
from otel_kprofiler.forks import ForkAware, ForkStep, ProcessLock
from otel_kprofiler.host import Access, HostFiles
from otel_kprofiler.model import Ksymbol, KsymbolAction, KsymbolBatch, KsymbolChange, KsymbolDetails
from otel_kprofiler.tracking.ksymbol_readers import BaselineReader, Reading, ReadMethod
from otel_kprofiler.tracking.ksymbol_records import LostRecord, make_changes, parse_perf_records
from otel_kprofiler.tracking.program_details import describe
from otel_kprofiler.tracking.record_events import KSYMBOLS, SETTLE_NS, RecordEvents, RecordLoss

QUEUE_BYTES: Final = 8 << 20
"""Limit on data queued for ``poll``. Excess data is dropped, and then all symbols are reread."""
FOLLOW_INTERVAL_S: Final = 5.0
"""Interval between checks for new CPUs. All symbols are reread when a CPU comes online."""
READ_INTERVAL_S: Final = 0.2
ALL_INTERVAL_S: Final = 10.0
"""Minimum interval between two reads of kallsyms."""
ALL_REST: Final = 50
"""Minimum pause between reads of kallsyms, as a multiple of the last read's duration."""
QUIET_S: Final = 0.5
"""Time without losses that must pass before kallsyms is read, in seconds."""

_log = logging.getLogger(__name__)
_TIME = attrgetter("time_ns")


class KsymbolCounts(NamedTuple):
    """Counters for a watch since it was opened.

    Attributes:
        lost: number of lost records by cause and CPU; a loss of unknown size is counted as one.
        readings: number of times that all programs were reread after records were lost.
        kallsyms_reads: number of times that ``/proc/kallsyms`` was read.
        wakeups: number of times that the thread was woken.
    """

    added: int
    removed: int
    lost: dict[tuple[RecordLoss, int], int]
    readings: int
    kallsyms_reads: int
    wakeups: int


class KsymbolWatch(ForkAware):
    """Reports ksymbol changes on this host until closed.

    To avoid missing changes, open the watch before kallsyms is read. Call ``poll`` and ``close`` in
    the same thread; ``describe`` and ``counts`` are thread-safe. In a forked child, the watch is
    closed. Raises ``HostError`` if the kernel refuses the events, which need CAP_PERFMON.

    Args:
        missed_since_ns: boottime after which changes were missed, for example in a forked child; if
            given, all symbols are reread.
        ring_bytes: size of each CPU's ring; the number of pages must be a power of two. None
            selects a size that any user may lock; see :func:`plan_ring_bytes`.
        queue_bytes: limit on data queued for ``poll``.
    """

    def __init__(
        self,
        files: HostFiles | None = None,
        *,
        missed_since_ns: int | None = None,
        ring_bytes: int | None = None,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        files = files or Access()
        self._queue_bytes = queue_bytes
        self._lock = ProcessLock()  # guards the events and all attributes up to the blank line
        self._lost: Counter[tuple[RecordLoss, int]] = Counter()
        self._lost_since_ns = self._lost_ns = (
            0  # times of the first and last loss not yet repaired by a reread
        )
        self._chunks: list[tuple[int, bytes]] = []
        self._readings: list[KsymbolChange] = []
        self._losses: list[KsymbolChange] = []
        self._polled_ns = self._followed_ns = _now_ns()

        self._changes: list[KsymbolChange] = []
        self._added = self._removed = 0  # counted by poll()
        self._wakeups = self._reads = 0  # counted by the watching thread
        self._read_wanted = self._all_wanted = False
        self._closed = False
        self._baseline = BaselineReader(files)
        self._events = RecordEvents(files, KSYMBOLS, ring_bytes, self._lose)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events.epoll.register(self._wake_fd, select.EPOLLIN)
        if missed_since_ns is not None:
            self._losses = [
                KsymbolChange(missed_since_ns, KsymbolAction.LOST, until_ns=self._polled_ns)
            ]
            self._all_wanted = True
        self._push(_now_ns(), self._baseline.read_programs())
        self._thread = threading.Thread(target=self._run, name="kprofiler-ksymbols", daemon=True)
        forks.register(ForkStep.RELEASE, self)

    @property
    def method(self) -> ReadMethod:
        """Returns how the programs that were already loaded at startup were read."""
        return self._baseline.method

    def poll(self, now_ns: int) -> KsymbolBatch:
        """Drain the rings and return the changes since the last call, in time order.

        ``now_ns`` is the current boottime.
        """
        if self._thread.ident is None and not self._closed:
            self._thread.start()
        with self._lock:
            self._drain()
            chunks, self._chunks = self._chunks, []
            for cpu, data in chunks:
                self._changes += self._parse(cpu, data)  # may detect losses
            reported, self._readings, self._losses = self._losses + self._readings, [], []
            complete_ns = now_ns - SETTLE_NS
            if self._lost_since_ns:
                complete_ns = min(complete_ns, self._lost_since_ns)
            self._polled_ns = now_ns
        self._changes.sort(key=_TIME)
        count = len(self._changes)
        while count and self._changes[count - 1].time_ns >= now_ns - SETTLE_NS:
            count -= 1
        released, self._changes = self._changes[:count], self._changes[count:]
        # A full symbol list is complete as of its timestamp, so it is returned immediately.
        return KsymbolBatch(sorted([*reported, *released], key=_TIME), complete_ns)

    def describe(self, symbol: Ksymbol) -> KsymbolDetails | None:
        """Returns details about a BPF function's program, such as its type and attachment."""
        return describe(symbol)

    def counts(self) -> KsymbolCounts:
        """Returns the counters."""
        with self._lock:
            lost = dict(self._lost)
        return KsymbolCounts(
            self._added, self._removed, lost, self._reads, self._baseline.kallsyms_reads,
            self._wakeups,
        )  # fmt: skip

    def count_lost(self) -> Mapping[str, int]:
        """Returns the number of lost records by cause, counting a loss of unknown size as one."""
        lost = Counter[str]()
        for (cause, _), count in self.counts().lost.items():
            lost[cause.value] += count
        return lost

    def close(self) -> None:
        """Stop the thread and close the events; idempotent."""
        if not self._closed:
            self._closed = True
            os.eventfd_write(self._wake_fd, 1)
            if self._thread.ident is not None:
                self._thread.join()
            self._release()

    def after_fork_in_child(self) -> None:
        """Close the shared events."""
        self._release()

    def _release(self) -> None:
        forks.unregister(self)
        self._closed = True
        with self._lock:
            self._events.close()
            os.close(self._wake_fd)

    def _drain(self) -> None:
        """Move data from the rings to the queue; the caller holds the lock."""
        if self._closed:
            return
        self._chunks += self._events.take()
        if sum(len(data) for _, data in self._chunks) > self._queue_bytes:
            for cpu, data in self._chunks:
                self._lose(RecordLoss.QUEUE_FULL, cpu, len(parse_perf_records(data).records))
            self._chunks = []

    def _lose(self, cause: RecordLoss, cpu: int, count: int) -> None:
        with self._lock:
            self._lost[cause, cpu] += max(count, 1)
            self._lost_ns = _now_ns()
            since_ns = self._followed_ns if cause is RecordLoss.CPU_CAME else self._polled_ns
            since_ns = min([since_ns, *(loss.time_ns for loss in self._losses)])
            self._losses = [KsymbolChange(since_ns, KsymbolAction.LOST, until_ns=self._lost_ns)]
            self._lost_since_ns = self._lost_since_ns or self._polled_ns
            self._read_wanted = self._all_wanted = True
        _log.warning(
            "BPF symbol records were lost on CPU %d (%s); number of records: %s",
            cpu, cause.value, count or "unknown",
        )  # fmt: skip
        os.eventfd_write(self._wake_fd, 1)

    def _parse(self, cpu: int, data: bytes) -> list[KsymbolChange]:
        records, damaged = parse_perf_records(data)
        if damaged:
            self._lose(RecordLoss.DAMAGED, cpu, 0)
        changes = make_changes(records)
        added = sum(change.action is KsymbolAction.ADDED for change in changes)
        self._added += added
        self._removed += len(changes) - added
        for record in records:
            if isinstance(record, LostRecord):
                with self._lock:
                    self._events.note_lost_record(cpu, record.lost)
        return changes

    def _run(self) -> None:
        follow_at, read_at, all_at = time.monotonic() + FOLLOW_INTERVAL_S, 0.0, 0.0
        while not self._closed:
            due = [follow_at, *[read_at] * self._read_wanted, *[all_at] * self._all_wanted]
            self._events.epoll.poll(max(0.0, min(due) - time.monotonic()))
            self._wakeups += 1
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            now = time.monotonic()
            with self._lock:
                self._drain()
                if now >= follow_at and not self._closed:
                    follow_at = now + FOLLOW_INTERVAL_S
                    self._events.follow()
                    self._followed_ns = _now_ns()
            if self._read_wanted and now >= read_at:
                read_at = now + READ_INTERVAL_S
                all_at = max(all_at, now + QUIET_S)
                self._read_programs()
            elif self._all_wanted and now >= all_at:
                self._read_all()
                ended = time.monotonic()
                all_at = ended + max(ALL_INTERVAL_S, ALL_REST * (ended - now))

    def _read_programs(self) -> None:
        self._read_wanted = False
        began_ns = _now_ns()
        reading = self._baseline.read_programs()
        if reading is not None:
            self._reads += 1
            self._push(began_ns, reading)

    def _read_all(self) -> None:
        self._all_wanted = False
        began_ns = _now_ns()
        # Stop if records are lost: in that case, BPF programs must be reread before all other
        # symbols.
        reading = self._baseline.read_all(lambda: not (self._closed or self._read_wanted))
        self._push(began_ns, reading)

    def _push(self, began_ns: int, reading: Reading | None) -> None:
        with self._lock:
            if reading is not None:
                self._readings.append(KsymbolChange(began_ns, *reading))
            if self._lost_ns < began_ns:
                self._lost_since_ns = 0


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
