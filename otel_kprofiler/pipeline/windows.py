"""Windows: samples of one reporting interval, grouped, with a timestamp for each."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from otel_kprofiler.clock import Clock, Interval, StreamClock
from otel_kprofiler.model import (
    ON_CPU,
    LossCause,
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


class WindowBuilder:
    """Collects resolved samples until the window's end has passed in event time.

    Samples must come in the order of their times (see :class:`EventTimeGate`). Belongs to
    one thread.

    Args:
        clock: converts boot time to Unix time; the offset of the moment of closing counts.
        schedule: how long windows last.
        start_boot_ns: start of the first window.
        period_ns: sampling distance of a CPU.
        kind: what is sampled.
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
        kind: ProfileKind = ON_CPU,
        random_unit: Callable[[], float] = random.random,
        pause: Callable[[], None] | None = None,
    ) -> None:
        self._clock = StreamClock(clock)
        self._schedule = schedule
        self._random_unit = random_unit
        self._pause = pause
        self._kind = kind
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
        self._groups: dict[Resource, dict[_Key, list[int]]] = {}
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
        group = self._groups.get(resource)
        if group is None:
            group = self._groups[resource] = {}
        key = (stack, sample.tid, sample.comm, sample.cpu, sample.link)
        times = group.get(key)
        if times is not None:
            times.append(sample.time_ns)
            return
        group[key] = [sample.time_ns]
        if stack.is_provisional:
            self._unfinished.setdefault(stack, sample)

    def close(
        self,
        end_boot_ns: int | None = None,
        *,
        taken: int = 0,
        lost: Mapping[LossCause, int] | None = None,
        totals: StreamTotals | None = None,
        resolve_again: Callable[[RawSample], Stack] | None = None,
        renew: Callable[[Collection[Resource]], Mapping[Resource, Resource]] | None = None,
    ) -> Window:
        """Close the window and open the next one.

        Args:
            end_boot_ns: the end, when it is not the scheduled one.
            taken: samples that the kernel took in this window.
            lost: how many of them were lost, by cause.
            totals: the account of the stream, this window included.
            resolve_again: called once for each stack with frames whose module was not known
                when the sample was resolved, and may be by now.
            renew: tells which Resources have changed since they were first seen.
        """
        end = self.end_boot_ns if end_boot_ns is None else end_boot_ns
        interval = self._interval(end)
        again = self._resolved_again(resolve_again) if resolve_again else {}
        renewed = renew(self._groups.keys()) if renew else {}
        resources = [
            ResourceSamples(
                renewed.get(resource, resource), _samples(group, again, interval, self._pause)
            )
            for resource, group in self._groups.items()
        ]
        period_ns = self.period_ns
        self._is_first = self._is_first and not resources
        if self._limit_ns is not None:
            longest_ns = self._schedule.interval_ns
            self._limit_ns = min(2 * self._limit_ns, longest_ns) if self._is_first else None
        self._open(interval.end_boot_ns)
        return Window(
            kind=self._kind,
            period_ns=period_ns,
            start_unix_ns=interval.start_unix_ns,
            end_unix_ns=interval.end_unix_ns,
            resources=resources,
            taken=taken,
            lost=dict(lost or {}),
            totals=totals,
        )

    def skip_to(self, boot_ns: int) -> None:
        """Begin the window later, as long as it holds nothing; such as after a suspend."""
        if not self._groups and boot_ns > self.start_boot_ns:
            self._open(boot_ns)

    def _interval(self, end_boot_ns: int) -> Interval:
        """The window's interval, wide enough for what came out of time all the same."""
        times = [times for group in self._groups.values() for times in group.values()]
        start = self.start_boot_ns
        if self._is_first:
            start = min([start, *(some[0] for some in times)])
        end = max([end_boot_ns, *(some[-1] + 1 for some in times)])
        return self._clock.interval(start, end)

    def _resolved_again(self, resolve: Callable[[RawSample], Stack]) -> dict[Stack, Stack]:
        return {stack: resolve(sample) for stack, sample in self._unfinished.items()}


def _samples(
    group: dict[_Key, list[int]],
    again: dict[Stack, Stack],
    interval: Interval,
    pause: Callable[[], None] | None,
) -> list[WindowSample]:
    samples = []
    for (stack, tid, comm, cpu, link), times in group.items():
        if pause:
            pause()
        name = decode_name(comm)
        unix = interval.to_unix_ns(times)
        samples.append(WindowSample(again.get(stack, stack), tid, name, cpu, link, unix))
    return samples
