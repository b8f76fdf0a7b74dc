"""Makes samples of waits out of the records of their begins and ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from otel_kprofiler.bpf import (
    WAIT_HAS_BEGUN,
    WAIT_IN_IOWAIT,
    WAIT_IS_THROTTLED,
    WAIT_KEPT,
    WaitEnd,
    WaitRecord,
    WaitThread,
)
from otel_kprofiler.model import OFF_CPU, RawSample, Wait, WaitState
from otel_kprofiler.sampling.off_cpu import MAX_THRESHOLD_NS, USUAL_WAITS_PER_SECOND

_INTERVAL_NS: Final = 1_000_000_000
_LONGEST_STEP: Final = 2.0
_SMALLEST_CHANGE: Final = 0.02
FIRST_THRESHOLD_NS: Final = 10_000_000
"""At the usual rate; with more samples wanted, it is as much shorter."""


@dataclass(slots=True)
class _Pending:
    """A wait that goes on, and what was told of it already."""

    begin: RawSample
    asleep_ns: int = 0
    runnable_ns: int = 0


class WaitJoiner:
    """Joins begins and ends. Not thread-safe.

    A wait of duration d is sampled with the chance p = min(1, d / threshold), which the program has
    seen to, and stands for d / p = max(d, threshold) nanoseconds: the sum over samples estimates
    the time of all waits that are not too short to be sampled. A wait whose thread slept and then
    wanted a CPU becomes two samples, which share that.

    Attributes:
        added: samples beyond one for each record of a sampled wait.
    """

    def __init__(self) -> None:
        self.added = 0
        self._pending: dict[tuple[int, int], _Pending] = {}

    def join(self, records: Iterable[WaitRecord]) -> list[RawSample]:
        """The samples of the waits that ended."""
        samples: list[RawSample] = []
        for sample, end in records:
            key = sample.tgid, sample.tid
            if end is None:
                self._pending[key] = _Pending(sample)
                continue
            pending = self._pending.pop(key, None)
            if end.flags & WAIT_KEPT:
                known = pending is not None and pending.begin.value == end.since_ns
                parts = _split(sample, end, pending if known else None)
                self.added += len(parts) - 1
                samples += parts
        return samples

    def forget(self, threads: Iterable[WaitThread]) -> None:
        """Drop what is kept of threads that have ended."""
        for thread in threads:
            self._pending.pop((thread.tgid, thread.tid), None)

    def clear(self) -> None:
        """Drop all waits that go on."""
        self._pending.clear()

    def tell(
        self, threads: Iterable[WaitThread], now_ns: int, boot_ns: int, epoch: int
    ) -> list[RawSample]:
        """Samples of waits that go on, for what has passed since they were told last.

        Only those that are sampled for sure, whose begin was told.

        Args:
            threads: as they are.
            now_ns: time of their clock before they were read.
            boot_ns: time of ``CLOCK_BOOTTIME``, which the samples get.
            epoch: waits of another one are not known to last.
        """
        samples = []
        for thread in threads:
            since = thread.off_since_ns
            if (
                not thread.flags & WAIT_HAS_BEGUN
                or not since
                or thread.epoch != epoch
                or now_ns - since < thread.threshold_ns
            ):
                continue
            pending = self._pending.get((thread.tgid, thread.tid))
            if pending is None or pending.begin.value != since:
                continue
            asleep, runnable = thread.passed(now_ns)
            if thread.state == WaitState.RUNNABLE:
                asleep, runnable = 0, asleep
            begin, is_throttled = pending.begin, bool(thread.flags & WAIT_IS_THROTTLED)
            for state, passed in (
                (WaitState(thread.state), asleep - pending.asleep_ns),
                (WaitState.RUNNABLE, runnable - pending.runnable_ns),
            ):
                if passed > 0:
                    throttled = is_throttled and state == WaitState.RUNNABLE
                    wait = Wait(state, begin.time_ns, passed, False, False, throttled)
                    samples.append(
                        begin._replace(kind=OFF_CPU, value=passed, time_ns=boot_ns, wait=wait)
                    )
            pending.asleep_ns = max(asleep, pending.asleep_ns)
            pending.runnable_ns = max(runnable, pending.runnable_ns)
        self.added += len(samples)
        return samples


def _split(sample: RawSample, end: WaitEnd, pending: _Pending | None) -> list[RawSample]:
    """The samples of a wait that was sampled: of its sleep, and of the time until it ran."""
    duration = end.asleep_ns + end.runnable_ns
    asleep, runnable = end.asleep_ns, end.runnable_ns
    source, start_ns = sample, sample.time_ns - duration
    if pending is not None:
        source, start_ns = pending.begin, pending.begin.time_ns
        told = pending.asleep_ns + pending.runnable_ns
        asleep = max(0, asleep - pending.asleep_ns)
        # The state at a reading may have turned out as another: the sum stays what it is.
        runnable = max(0, min(duration - told - asleep, duration - told))
    rest = asleep + runnable
    weight = max(rest, end.threshold_ns) if rest == duration else rest
    parts = []
    for state, passed in ((end.state, asleep), (WaitState.RUNNABLE, runnable)):
        if not passed:
            continue
        sleeping = state != WaitState.RUNNABLE
        wait = Wait(
            state,
            start_ns,
            passed,
            True,
            sleeping and bool(end.flags & WAIT_IN_IOWAIT),
            not sleeping and bool(end.flags & WAIT_IS_THROTTLED),
            end.waker if sleeping else None,
        )
        value = weight * passed // rest
        parts.append(
            source._replace(
                kind=OFF_CPU, value=value, time_ns=sample.time_ns, cpu=sample.cpu, wait=wait
            )
        )
    if len(parts) > 1:  # what division has cut off
        parts[1] = parts[1]._replace(value=weight - parts[0].value)
    return parts


class ThresholdControl:
    """Chooses the threshold for a rate of samples.

    Args:
        least_ns: the lowest threshold.
        now_ns: the time.
        per_second: the rate on each CPU, from which the first threshold follows.
    """

    def __init__(self, least_ns: int, now_ns: int, per_second: int) -> None:
        self._least_ns = max(1, least_ns)
        usual = USUAL_WAITS_PER_SECOND
        first = FIRST_THRESHOLD_NS * usual // max(per_second, usual)
        self.threshold_ns = max(first, self._least_ns)
        self._since_ns = now_ns
        self._taken = 0

    def update(self, now_ns: int, taken: int, per_second: int) -> bool:
        """Look once a second at how many waits were sampled; whether the threshold has changed.

        Args:
            now_ns: the time.
            taken: waits sampled since the start.
            per_second: the rate on all CPUs, 1 at least.
        """
        passed = now_ns - self._since_ns
        if passed < _INTERVAL_NS:
            return False
        expected = per_second * passed / _INTERVAL_NS
        step = (taken - self._taken) / expected
        self._since_ns, self._taken = now_ns, taken
        step = min(max(step, 1 / _LONGEST_STEP), _LONGEST_STEP)
        wanted = min(max(round(self.threshold_ns * step), self._least_ns), MAX_THRESHOLD_NS)
        if abs(wanted - self.threshold_ns) <= _SMALLEST_CHANGE * self.threshold_ns:
            return False
        self.threshold_ns = wanted
        return True
