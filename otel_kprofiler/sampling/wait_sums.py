"""Computes the off-CPU time of each process since its threads' totals were last read."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from otel_kprofiler.bpf import WaitThread
from otel_kprofiler.model import ProcessKey, WaitTotals


class _Reported(NamedTuple):
    """A thread's last report.

    Attributes:
        scan: the number of the scan.
        by_state: the time by state, including the wait in progress.
        ended: the time by state, without the wait in progress.
        waits: the number of waits.
        below_ns: the time in short waits.
    """

    scan: int
    by_state: tuple[int, ...]
    ended: tuple[int, ...]
    waits: int
    below_ns: int


class WaitSums:
    """Computes increases in off-CPU time per process from cumulative sums per thread."""

    def __init__(self) -> None:
        self._round = 0
        self._epoch = 0
        self._reported: dict[int, _Reported] = {}
        self._ready: dict[ProcessKey, WaitTotals] = {}

    def add_ended(self, threads: Iterable[WaitThread]) -> None:
        """Add the final sums for exited threads."""
        for thread in threads:
            self._add(thread, thread.by_state, self._reported.pop(thread.id, None))

    def read(
        self, threads: Iterable[WaitThread], now_ns: int, epoch: int
    ) -> Mapping[ProcessKey, WaitTotals]:
        """Returns each process's off-CPU totals since the last call.

        Whether or not ``threads`` contains a thread that has just exited, the thread may later be
        passed to :meth:`add_ended`. ``now_ns`` must have been read before ``threads``, from the
        clock that timestamps the threads. Skips waits from epochs other than ``epoch``, because
        those waits may have completed.
        """
        self._round += 1
        if epoch != self._epoch:  # the waits in progress are not added to the sums when they end
            self._epoch = epoch
            for thread_id, last in self._reported.items():
                self._reported[thread_id] = last._replace(by_state=last.ended)
        living = set[ProcessKey]()
        for thread in threads:
            living.add(_process_of(thread))
            by_state = thread.by_state
            if thread.off_since_ns and thread.epoch == epoch:
                asleep, woken = thread.passed(now_ns)
                sums = list(by_state)
                sums[thread.state] += asleep
                sums[0] += woken
                by_state = tuple(sums)
            by_state = self._add(thread, by_state, self._reported.get(thread.id))
            self._reported[thread.id] = _Reported(
                self._round, by_state, thread.by_state, thread.waits, thread.below_ns
            )
        # A thread that is missing may just have exited, and its final sums may still arrive, so
        # keep its last report until the next read.
        old = [
            thread_id
            for thread_id, reported in self._reported.items()
            if reported.scan < self._round - 1
        ]
        for thread_id in old:
            del self._reported[thread_id]
        ready, self._ready = self._ready, {}
        for process in ready.keys() - living:
            ready[process] = ready[process]._replace(has_ended=True)
        return ready

    def _add(
        self, thread: WaitThread, by_state: tuple[int, ...], reported: _Reported | None
    ) -> tuple[int, ...]:
        """Add a thread's increments since its last report, and return its current sums."""
        waits, below, new = thread.waits, thread.below_ns, by_state
        if reported is not None:
            if by_state != reported.by_state:
                by_state = _keep_reported(by_state, reported.by_state)
            new = tuple([a - b for a, b in zip(by_state, reported.by_state, strict=True)])
            waits, below = waits - reported.waits, below - reported.below_ns
        if waits or any(new):
            key, more = _process_of(thread), WaitTotals(new, waits, below)
            previous = self._ready.get(key)
            self._ready[key] = more if previous is None else previous.plus(more)
        return by_state


def _keep_reported(by_state: tuple[int, ...], reported: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sums by state, each at least as large as the last reported sum.

    A sleep sum can decrease, because reported sleep may turn out to be runnable time.
    """
    kept = list(map(max, by_state, reported))
    excess = sum(kept) - sum(by_state)
    kept[0] = max(kept[0] - excess, reported[0])
    return tuple(kept)


def _process_of(thread: WaitThread) -> ProcessKey:
    return ProcessKey(thread.tgid, thread.start_time_ns or None)
