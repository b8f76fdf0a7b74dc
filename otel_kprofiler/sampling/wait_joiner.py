"""Joins wait-start and wait-end records into wait samples."""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from otel_kprofiler.bpf import (
    WAIT_HAS_BEGUN,
    WAIT_IN_IOWAIT,
    WAIT_IS_THROTTLED,
    WAIT_KEPT,
    WAIT_UNIT_NS,
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
"""First threshold at the usual sample rate, in nanoseconds. The first threshold is lower for higher
rates."""


@dataclass(slots=True)
class _Pending:
    """An ongoing wait, and how much of its duration has been sampled so far."""

    begin: RawSample
    asleep_ns: int = 0
    runnable_ns: int = 0

    def pass_to(self, thread: WaitThread, now_ns: int, boot_ns: int) -> tuple[int, int]:
        """Mark the wait as sampled up to now, and return the newly sampled sleep and runnable time.

        The threads' clock may be unstable, so the wait is capped at the elapsed ``CLOCK_BOOTTIME``.
        """
        limit = max(boot_ns - self.begin.time_ns, 0)
        asleep, runnable = thread.passed(now_ns)
        asleep = min(asleep, limit)
        runnable = min(runnable, limit - asleep)
        if thread.state == WaitState.RUNNABLE:
            asleep, runnable = 0, asleep
        new = max(asleep - self.asleep_ns, 0), max(runnable - self.runnable_ns, 0)
        self.asleep_ns += new[0]
        self.runnable_ns += new[1]
        return new


class WaitJoiner:
    """Joins wait-start and wait-end records into samples. Not thread-safe.

    The BPF program samples a wait of duration d with probability p = min(1, d / threshold). The
    sample has the value d / p = max(d, threshold) nanoseconds, so that the sum over samples
    estimates the total time of all waits long enough to be sampled. A wait during which the thread
    slept and then waited for a CPU becomes two samples, whose values add up to d / p.

    Args:
        is_left_out: returns whether the thread of a record is excluded.

    Attributes:
        added: number of samples minus the number of records of sampled waits; negative if many
            records are excluded.
        lasting_threshold_ns: threshold, in nanoseconds, that :meth:`sample_lasting` last used.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        is_left_out: Callable[[RawSample], bool] = lambda _: False,
    ) -> None:
        self._is_left_out = is_left_out
        self.added = 0
        self.lasting_threshold_ns = 0
        self._random = rng or random.Random()  # noqa: S311 - no secret
        self._pending: dict[tuple[int, int], _Pending] = {}

    def join(self, records: Iterable[WaitRecord]) -> list[RawSample]:
        """Returns samples for the waits that have completed."""
        samples: list[RawSample] = []
        for sample, end in records:
            key = sample.tgid, sample.tid
            if end is None:
                if not self._is_left_out(sample):
                    self._pending[key] = _Pending(sample)
                continue
            if self._is_left_out(sample):
                self.added -= bool(end.flags & WAIT_KEPT)
                continue
            pending = self._pending.pop(key, None)
            if end.flags & WAIT_KEPT:
                is_known = (
                    bool(end.flags & WAIT_HAS_BEGUN)
                    and pending is not None
                    and pending.begin.value == end.since_ns
                )
                parts = _split(sample, end, pending if is_known else None)
                self.added += len(parts) - 1
                samples += parts
        return samples

    def forget(self, threads: Iterable[WaitThread]) -> None:
        """Drop the state of exited threads, but keep that of later threads with the same ids."""
        for thread in threads:
            key = thread.tgid, thread.tid
            pending = self._pending.get(key)
            if pending is not None and pending.begin.time_ns <= thread.ended_ns:
                del self._pending[key]

    def clear(self) -> None:
        """Drop all ongoing waits."""
        self._pending.clear()

    def sample_lasting(
        self,
        threads: Iterable[WaitThread],
        now_ns: int,
        boot_ns: int,
        epoch: int,
        most: float = math.inf,
    ) -> list[RawSample]:
        """Sample the time spent in ongoing waits since the last call.

        Includes only waits that exceed the threshold and whose start record was received. Each wait
        is sampled with a probability proportional to its time since the last call, so that at most
        ``most`` are sampled on average. A wait is always sampled if this time is at least
        :attr:`lasting_threshold_ns`.

        ``now_ns`` must have been read before ``threads``, from the clock used for the threads'
        timestamps. The samples have the timestamp ``boot_ns``. Skips waits from epochs other than
        ``epoch``, because those waits may have completed.
        """
        parts = [
            (thread, pending, passed)
            for thread in threads
            if (pending := self._find_lasting(thread, now_ns, epoch)) is not None
            and any(passed := pending.pass_to(thread, now_ns, boot_ns))
        ]
        threshold_ns = int(sum(sum(passed) for _, _, passed in parts) / most)
        self.lasting_threshold_ns = threshold_ns
        samples: list[RawSample] = []
        for thread, pending, passed in parts:
            duration_ns = sum(passed)
            if self._random.random() * threshold_ns >= duration_ns:
                continue
            weight_ns = max(duration_ns, threshold_ns)
            samples += _share(pending.begin, thread, passed, weight_ns, boot_ns)
        self.added += len(samples)
        return samples

    def _find_lasting(self, thread: WaitThread, now_ns: int, epoch: int) -> _Pending | None:
        """Returns a thread's ongoing wait if it exceeds the threshold."""
        since = thread.off_since_ns
        if (
            not thread.flags & WAIT_HAS_BEGUN
            or not since
            or thread.epoch != epoch
            or now_ns - since < thread.threshold_ns
        ):
            return None
        pending = self._pending.get((thread.tgid, thread.tid))
        return pending if pending is not None and pending.begin.value == since else None


def _share(
    begin: RawSample, thread: WaitThread, passed: tuple[int, int], weight_ns: int, boot_ns: int
) -> list[RawSample]:
    """Returns samples for the sleep and for the runnable time, which share the weight."""
    is_throttled = bool(thread.flags & WAIT_IS_THROTTLED)
    samples, rest = [], weight_ns
    for state, part in zip((WaitState(thread.state), WaitState.RUNNABLE), passed, strict=True):
        if not part:
            continue
        throttled = is_throttled and state == WaitState.RUNNABLE
        wait = Wait(state, begin.time_ns, part, False, False, throttled)
        value = min(rest, -(-weight_ns * part // sum(passed)))
        rest -= value
        samples.append(begin._replace(kind=OFF_CPU, value=value, time_ns=boot_ns, wait=wait))
    return samples


def _split(sample: RawSample, end: WaitEnd, pending: _Pending | None) -> list[RawSample]:
    """Returns the samples of a sampled wait: one for sleep, and one for runnable time."""
    duration = end.asleep_ns + end.runnable_ns
    asleep, runnable = end.asleep_ns, end.runnable_ns
    source, start_ns = sample, sample.time_ns - duration
    if pending is not None:
        source, start_ns = pending.begin, pending.begin.time_ns
        sampled = pending.asleep_ns + pending.runnable_ns
        asleep = max(0, asleep - pending.asleep_ns)
        # Time sampled as sleep may turn out to be runnable time, so only the total is reliable.
        runnable = max(0, min(duration - sampled - asleep, duration - sampled))
    rest = asleep + runnable
    weight = rest * max(duration, end.threshold_ns) // duration if duration else 0
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
    if len(parts) > 1:  # the second part includes the remainder of the division
        parts[1] = parts[1]._replace(value=weight - parts[0].value)
    return parts


class ThresholdControl:
    """Chooses the sampling threshold for a target rate of sampled waits. Not thread-safe.

    Within a second, the BPF program itself raises the threshold on a CPU that exceeds the rate
    (``fits_budget`` in ``wait.bpf.h``). Each sample contains the threshold that applied to it.

    Args:
        least_ns: minimum threshold.
        per_second: target number of waits sampled per second on each CPU; determines the initial
            threshold.

    Attributes:
        threshold_ns: the threshold, a multiple of :data:`WAIT_UNIT_NS`.
    """

    def __init__(self, least_ns: int, now_ns: int, per_second: int) -> None:
        self._least_ns = _round_up(max(1, least_ns))
        usual = USUAL_WAITS_PER_SECOND
        first = FIRST_THRESHOLD_NS * usual // max(per_second, usual)
        self.threshold_ns = max(_round_up(first), self._least_ns)
        self._since_ns = now_ns
        self._taken = 0
        self._samples = self._sum_ns = 0

    def note(self, threshold_ns: int) -> None:
        """Record the threshold of a sampled wait."""
        self._samples += 1
        self._sum_ns += threshold_ns

    def update(self, now_ns: int, taken: int, per_second: int) -> bool:
        """Adjust the threshold once a second, and return whether it changed.

        ``taken`` is the number of waits sampled since sampling started. ``per_second`` is the
        target rate, summed over all CPUs, at least 1.
        """
        passed = now_ns - self._since_ns
        if passed < _INTERVAL_NS:
            return False
        expected = per_second * passed / _INTERVAL_NS
        step = (taken - self._taken) / expected
        step = min(max(step, 1 / _LONGEST_STEP), _LONGEST_STEP)
        in_use_ns = self._sum_ns / self._samples if self._samples else self.threshold_ns
        self._since_ns, self._taken = now_ns, taken
        self._samples = self._sum_ns = 0
        wanted = min(max(_round_up(round(in_use_ns * step)), self._least_ns), MAX_THRESHOLD_NS)
        if abs(wanted - self.threshold_ns) <= _SMALLEST_CHANGE * self.threshold_ns:
            return False
        self.threshold_ns = wanted
        return True


def _round_up(threshold_ns: int) -> int:
    return -(-threshold_ns // WAIT_UNIT_NS) * WAIT_UNIT_NS
