"""Computes how long each process waited between two readings of its threads' sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from otel_kprofiler.bpf import WaitThread
from otel_kprofiler.model import ProcessKey, WaitTotals

_Reported = tuple[int, tuple[int, ...], int, int]
"""State of a thread: the round, and its sums by state, waits, and time in short ones."""


class WaitSums:
    """Turns the threads' growing sums into what each process got between two readings."""

    def __init__(self) -> None:
        self._round = 0
        self._reported: dict[int, _Reported] = {}
        self._ready: dict[ProcessKey, WaitTotals] = {}

    def add_ended(self, threads: Iterable[WaitThread]) -> None:
        """Add the rest of threads that have ended."""
        for thread in threads:
            self._add(thread, thread.by_state, self._reported.pop(thread.id, None))

    def read(
        self, threads: Iterable[WaitThread], now_ns: int, epoch: int
    ) -> Mapping[ProcessKey, WaitTotals]:
        """Returns the totals of each process since the last call.

        Args:
            threads: those that live; one that has just ended may be left out, or come in
                :meth:`add_ended` afterwards.
            now_ns: time of their clock before they were read.
            epoch: waits of another one are not known to last.
        """
        self._round += 1
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
            self._reported[thread.id] = self._round, by_state, thread.waits, thread.below_ns
        # A thread that ended after the last records were taken is in the next ones.
        old = [one for one, reported in self._reported.items() if reported[0] < self._round - 1]
        for one in old:
            del self._reported[one]
        ready, self._ready = self._ready, {}
        for process in ready.keys() - living:
            ready[process] = ready[process]._replace(has_ended=True)
        return ready

    def _add(
        self, thread: WaitThread, by_state: tuple[int, ...], reported: _Reported | None
    ) -> tuple[int, ...]:
        """Add what is new since a thread was reported; returns its sums now."""
        waits, below, new = thread.waits, thread.below_ns, by_state
        if reported is not None:
            _, reported_states, reported_waits, reported_below = reported
            if by_state != reported_states:
                by_state = _keep_reported(by_state, reported_states)
            new = tuple([a - b for a, b in zip(by_state, reported_states, strict=True)])
            waits, below = waits - reported_waits, below - reported_below
        if waits or any(new):
            key, more = _process_of(thread), WaitTotals(new, waits, below)
            before = self._ready.get(key)
            self._ready[key] = more if before is None else before.plus(more)
        return by_state


def _keep_reported(by_state: tuple[int, ...], reported: tuple[int, ...]) -> tuple[int, ...]:
    """Sums that are nowhere below those that were reported.

    Reported sleep may turn out as time in which the thread wanted a CPU: that is less then.
    """
    kept = list(map(max, by_state, reported))
    excess = sum(kept) - sum(by_state)
    kept[0] = max(kept[0] - excess, reported[0])
    return tuple(kept)


def _process_of(thread: WaitThread) -> ProcessKey:
    return ProcessKey(thread.tgid, thread.start_time_ns or None)
