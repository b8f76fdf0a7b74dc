"""Windows: samples of one reporting interval, grouped, with a timestamp for each."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from otel_kprofiler.clock import Clock, Interval, StreamClock
from otel_kprofiler.model import (
    KINDS,
    Losses,
    Profile,
    ProfileKind,
    RawSample,
    Resource,
    ResourceSamples,
    SpanLink,
    Stack,
    StreamTotals,
    Window,
    WindowSample,
)
from otel_kprofiler.text import decode_name

DRAIN_INTERVAL_S: Final = 0.25
"""How often the ring is drained; the kernel wakes us sooner when it fills up."""
FIRST_WINDOW_NS: Final = 100_000_000
"""Length of the first window of whatever runs for long."""

_Key = tuple[Stack, int, bytes, int, SpanLink | None]
_Group = dict[_Key, list[int]]
"""Times and values of equal samples, in turn."""


@dataclass(frozen=True, slots=True)
class WindowSchedule:
    """How long windows last.

    Attributes:
        interval_ns: length of a window.
        jitter: each window is longer or shorter by up to this share, 0 … 1, so that many
            hosts do not report at the same moment.
        first_ns: length of the first window, so that something is seen soon. While windows turn
            out to be empty, each is twice as long as the one before.
        max_samples: a window that holds this many ends early; None for no limit.
    """

    interval_ns: int
    jitter: float = 0.0
    first_ns: int | None = None
    max_samples: int | None = None

    def length_ns(self, random_unit: float) -> int:
        """Length of a window later on; ``random_unit`` is in [0, 1)."""
        return max(1, round(self.interval_ns * (1 + self.jitter * (2 * random_unit - 1))))


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """Counts of one kind's samples when a window is closed.

    Attributes:
        taken: samples that the kernel took in this window.
        lost: how many of them were lost, by cause.
        totals: the account of the stream, this window included.
    """

    taken: int = 0
    lost: Losses = field(default_factory=dict)
    totals: StreamTotals | None = None


class WindowBuilder:
    """Collects resolved samples until the window's end has passed in event time.

    Samples must come in the order of their times (see :class:`EventTimeGate`). Belongs to
    one thread.

    Args:
        clock: converts boot time to Unix time; the offset of the moment of closing counts.
        schedule: how long windows last.
        start_boot_ns: start of the first window.
        period_ns: sampling distance of a CPU, for kinds with a period.
        random_unit: source of jitter.
        pause: called again and again while a window is closed, to let other threads run.
    """

    def __init__(
        self,
        clock: Clock,
        schedule: WindowSchedule,
        *,
        start_boot_ns: int,
        period_ns: int,
        random_unit: Callable[[], float] = random.random,
        pause: Callable[[], None] | None = None,
    ) -> None:
        self._clock = StreamClock(clock)
        self._schedule = schedule
        self._random_unit = random_unit
        self._pause = pause
        self._is_first = True  # none with samples was closed
        self._limit_ns = schedule.first_ns  # of the next window's length, up to the first of them
        self._changes: deque[tuple[int, WindowSchedule, int]] = deque()
        self.period_ns = period_ns
        self.end_boot_ns = start_boot_ns
        self._open(start_boot_ns)

    def change(self, at_boot_ns: int, schedule: WindowSchedule, period_ns: int) -> None:
        """End a window at this boot time, from which on another schedule and period hold.

        No earlier than the last change, nor than any sample that was added.
        """
        self._changes.append((at_boot_ns, schedule, period_ns))
        self.end_boot_ns = max(min(self.end_boot_ns, at_boot_ns), self.start_boot_ns)

    def _open(self, start_boot_ns: int) -> None:
        self.start_boot_ns = start_boot_ns
        while self._changes and self._changes[0][0] <= start_boot_ns:
            _, self._schedule, self.period_ns = self._changes.popleft()
        length = self._schedule.length_ns(self._random_unit())
        if self._limit_ns is not None:
            length = min(length, self._limit_ns)
        self.end_boot_ns = start_boot_ns + length
        if self._changes:
            self.end_boot_ns = min(self.end_boot_ns, self._changes[0][0])
        self._kinds: dict[ProfileKind, dict[Resource, _Group]] = {}
        self._unfinished: dict[Stack, RawSample] = {}
        self._count = self._last_ns = 0

    def end_if_full(self, next_ns: int) -> bool:
        """End the window before the next sample if it holds as many as it may."""
        limit = self._schedule.max_samples
        if limit is None or self._count < limit or next_ns <= self._last_ns:
            return False
        self.end_boot_ns = min(self.end_boot_ns, next_ns)
        return True

    def add(self, sample: RawSample, stack: Stack, resource: Resource) -> None:
        """Add one sample; its time must lie before the window's end."""
        self._count += 1
        self._last_ns = sample.time_ns
        groups = self._kinds.get(sample.kind)
        if groups is None:
            groups = self._kinds[sample.kind] = {}
        group = groups.get(resource)
        if group is None:
            group = groups[resource] = {}
        key = (stack, sample.tid, sample.comm, sample.cpu, sample.link)
        series = group.get(key)
        if series is not None:
            series += (sample.time_ns, sample.value)
            return
        group[key] = [sample.time_ns, sample.value]
        if stack.is_provisional:
            self._unfinished.setdefault(stack, sample)

    def close(
        self,
        end_boot_ns: int | None = None,
        *,
        counts: Mapping[str, WindowCounts] = MappingProxyType({}),
        resolve_again: Callable[[RawSample], Stack] | None = None,
        renew: Callable[[Collection[Resource]], Mapping[Resource, Resource]] | None = None,
    ) -> Window:
        """Close the window and open the next one.

        Args:
            end_boot_ns: the end, when it is not the scheduled one.
            counts: by kind; each has a profile in the window, even without samples.
            resolve_again: called once for each stack with frames whose module was not known
                when the sample was resolved, and may be by now.
            renew: tells which Resources have changed since they were first seen.
        """
        interval = self._interval(self.end_boot_ns if end_boot_ns is None else end_boot_ns)
        again = self._resolved_again(resolve_again) if resolve_again else {}
        resources = {resource: resource for groups in self._kinds.values() for resource in groups}
        resources |= renew(resources.keys()) if renew else {}
        profiles = []
        for kind in KINDS:
            if kind.name not in counts and kind not in self._kinds:
                continue
            counted = counts.get(kind.name, WindowCounts())
            groups = [
                ResourceSamples(resources[resource], _samples(group, again, interval, self._pause))
                for resource, group in self._kinds.get(kind, {}).items()
            ]
            period_ns = self.period_ns if kind.period_type else 0
            profiles.append(
                Profile(kind, period_ns, groups, counted.taken, counted.lost, counted.totals)
            )
        self._is_first = self._is_first and not self._kinds
        if self._limit_ns is not None:
            longest_ns = self._schedule.interval_ns
            self._limit_ns = min(2 * self._limit_ns, longest_ns) if self._is_first else None
        self._open(interval.end_boot_ns)
        return Window(interval.start_unix_ns, interval.end_unix_ns, profiles)

    def skip_to(self, boot_ns: int) -> None:
        """Begin the window later, as long as it holds nothing; such as after a suspend."""
        if not self._kinds and boot_ns > self.start_boot_ns:
            self._open(boot_ns)

    def _interval(self, end_boot_ns: int) -> Interval:
        """The window's interval, wide enough for what came out of time all the same."""
        all_series = [
            series
            for groups in self._kinds.values()
            for group in groups.values()
            for series in group.values()
        ]
        start = self.start_boot_ns
        if self._is_first:
            start = min([start, *(series[0] for series in all_series)])
        end = max([end_boot_ns, *(series[-2] + 1 for series in all_series)])
        return self._clock.interval(start, end)

    def _resolved_again(self, resolve: Callable[[RawSample], Stack]) -> dict[Stack, Stack]:
        return {stack: resolve(sample) for stack, sample in self._unfinished.items()}


def _samples(
    group: _Group,
    again: dict[Stack, Stack],
    interval: Interval,
    pause: Callable[[], None] | None,
) -> list[WindowSample]:
    samples = []
    for (stack, tid, comm, cpu, link), series in group.items():
        if pause:
            pause()
        name = decode_name(comm)
        times, values = interval.to_unix_ns(series[::2]), series[1::2]
        if values.count(1) == len(values):
            values = []
        samples.append(WindowSample(again.get(stack, stack), tid, name, cpu, link, times, values))
    return samples
