"""Determines when windows end, and groups their samples."""

import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Final, NamedTuple

from otel_kprofiler.clock import Clock, Interval, StreamClock
from otel_kprofiler.model import (
    KINDS,
    LOCK_HOLDER_ID,
    LOCK_HOLDER_NAME,
    LOCK_TYPE,
    ON_CPU,
    LabelSet,
    LockTotals,
    LockWait,
    Losses,
    ProcessKey,
    Profile,
    ProfileKind,
    RawSample,
    Resource,
    ResourceSamples,
    SpanLink,
    Stack,
    StreamTotals,
    TracepointStacks,
    Wait,
    WaitStacks,
    WaitState,
    WaitTotals,
    Window,
    WindowSample,
    WindowWait,
    WindowWaker,
    find_stack_cause,
)
from otel_kprofiler.pipeline.budget import COARSE_LABELS, ProcessBudgets, name_coarse_thread
from otel_kprofiler.pipeline.schedule import WindowSchedule
from otel_kprofiler.speedups import group_samples
from otel_kprofiler.text import decode_name

MAX_BATCH: Final = 128
"""Maximum number of samples to resolve and add together."""
MAX_PACED_BATCH: Final = 8
"""Maximum number if the service's threads need the GIL. Adding them takes about 30 µs."""
_TIMES_PER_PERIOD: Final = 1000
"""On-CPU times are rounded to at most this part of the sampling period. Timers are not more exact,
and rounded times compress better."""

_WaitKey = tuple[WaitState, bool, bool, bool, tuple[int, int, bytes] | None]
"""A wait's state, its flags (ended, block I/O, throttled), and its waker's pid, tid and name."""


class _Context(NamedTuple):
    """A thread context, still encoded because its attribute names may be published later."""

    process: ProcessKey
    encoded: bytes


_Key = tuple[
    Stack, int, bytes, int, SpanLink | None, LabelSet | _Context, _WaitKey | LockWait | None
]
_Group = dict[_Key, list[int]]
"""Groups of equal samples, each as a list of alternating times and values."""
_PAIR: Final = 2


class WindowCounts(NamedTuple):
    """Sample counts of one profile kind, determined when a window closes.

    Attributes:
        taken: the number of samples that the BPF program took in this window.
        lost: number of samples taken but then lost, by cause.
        totals: the cumulative counts from the sampler's start to the end of this window.
        threshold_ns: the minimum duration, in nanoseconds, at which every wait is sampled; 0 for
            kinds other than waits.
        waits: the off-CPU time in this window, by Resource; empty for kinds other than waits.
        locks: lock wait totals for this window; empty for kinds other than lock contention.
    """

    taken: int = 0
    lost: Losses = MappingProxyType({})
    totals: StreamTotals | None = None
    threshold_ns: int = 0
    waits: Mapping[Resource, WaitTotals] = MappingProxyType({})
    locks: LockTotals = MappingProxyType({})


ContextDecoder = Callable[[ProcessKey, bytes, SpanLink | None], tuple[SpanLink | None, LabelSet]]
"""Decodes the thread context of a sample; see :meth:`ProcessResources.decode_context`."""


class WindowBuilder:
    """Collects resolved samples until the window's end has passed in event time.

    Samples must be added in time order (see :class:`EventTimeGate`). Not thread-safe.
    :class:`Pipeline` and :class:`PipelineOptions` describe the arguments not listed here.

    Args:
        clock: converts boottime to Unix time, using the offset in effect when a window closes.
        start_boot_ns: the start of the first window, in boottime.
        period_ns: the sampling period on each CPU, for kinds that have a period.
        kinds: the kinds of samples that may be added, in the order of their profiles.
        decode_context: returns the attributes of a thread context when the window closes; if None,
            samples have no context attributes.
    """

    def __init__(
        self,
        clock: Clock,
        schedule: WindowSchedule,
        *,
        start_boot_ns: int,
        period_ns: int,
        kinds: Sequence[ProfileKind] = KINDS,
        pause: Callable[[], None] | None = None,
        find_labels: Callable[[int], LabelSet] | None = None,
        decode_context: ContextDecoder | None = None,
        find_causes: bool = True,
        scheduler_rvas: range = range(0),
        budgets: ProcessBudgets | None = None,
    ) -> None:
        self._budgets = budgets
        self._find_causes = find_causes
        self._scheduler_rvas = scheduler_rvas
        self._clock = StreamClock(clock)
        self._find_labels = find_labels
        self._decode_context = decode_context
        self._schedule = schedule
        self._pause = pause
        self._is_first = True  # no window with samples has been closed yet
        self._limit_ns = schedule.first_ns  # applies until a window with samples closes
        self._changes: deque[tuple[int, WindowSchedule, int]] = deque()
        self.period_ns = period_ns
        self._all_kinds = tuple(kinds)
        self.end_boot_ns = start_boot_ns
        self._open(start_boot_ns)

    def change(self, at_boot_ns: int, schedule: WindowSchedule, period_ns: int) -> None:
        """End a window at the given boottime, and apply a new schedule and period from then on.

        The boottime must not precede the previous change or any added sample.
        """
        self._changes.append((at_boot_ns, schedule, period_ns))
        self.end_boot_ns = max(min(self.end_boot_ns, at_boot_ns), self.start_boot_ns)

    def _open(self, start_boot_ns: int) -> None:
        self.start_boot_ns = start_boot_ns
        while self._changes and self._changes[0][0] <= start_boot_ns:
            _, self._schedule, self.period_ns = self._changes.popleft()
        length = self._schedule.length_ns(random.random())  # noqa: S311 - no secret
        if self._limit_ns is not None:
            length = min(length, self._limit_ns)
        self.end_boot_ns = start_boot_ns + length
        if self._changes:
            self.end_boot_ns = min(self.end_boot_ns, self._changes[0][0])
        self._kinds: dict[ProfileKind, dict[Resource, _Group]] = {}
        self._unfinished: dict[tuple[Stack, int], RawSample] = {}  # by thread, too
        self._count = self._last_ns = 0

    def end_if_full(self, next_ns: int) -> bool:
        """If the window is full, end it before the next sample; return whether it was full."""
        limit = self._schedule.max_samples
        if limit is None or self._count < limit or next_ns <= self._last_ns:
            return False
        self.end_boot_ns = min(self.end_boot_ns, next_ns)
        return True

    @property
    def room(self) -> int:
        """Returns how many samples to add, at most, before the next :meth:`end_if_full`."""
        limit, most = self._schedule.max_samples, MAX_PACED_BATCH if self._pause else MAX_BATCH
        return most if limit is None else max(1, min(most, limit - self._count))

    def add(self, samples: list[RawSample], stacks: list[Stack], resource: Resource) -> None:
        """Add samples of one kind and one program, whose times must be before the window's end."""
        first, budgets = samples[0], self._budgets
        self._count += len(samples)
        self._last_ns = max(self._last_ns, samples[-1].time_ns)
        groups = self._kinds.setdefault(first.kind, {}).setdefault(resource, {})
        group_in_c = group_samples
        if budgets and not budgets.admits(first, resource):
            group_in_c = None  # new groups have less detail
        at = 0
        while at < len(samples):
            if group_in_c:
                at, added = group_in_c(samples, stacks, at, groups)
                if budgets and added:
                    budgets.charge_groups(first, added)
                if at == len(samples):
                    break
            self._group(samples[at], stacks[at], resource, groups)
            at += 1

    def _group(self, sample: RawSample, stack: Stack, resource: Resource, groups: _Group) -> None:
        # Unpacking takes less than half as long as reading the fields by name.
        (
            _, value, time_ns, cpu, _, tid, _, _, comm, _, _, link,
            number, event, _, _, _, context,
        ) = sample  # fmt: skip
        labels: LabelSet | _Context = ()
        if context:
            labels = _Context(sample.process, context)
        elif number and self._find_labels:
            labels = self._find_labels(number)
        wait = _wait_key(event) if event else None
        key = (stack, tid, comm, cpu, link, labels, wait)
        added = [time_ns, value]
        series = groups.setdefault(key, added)  # get() followed by an insertion hashes keys twice
        if series is added and self._budgets and not self._budgets.admit(sample, resource):
            del groups[key]
            tid = sample.tgid if "process.pid" in resource.attributes else 0
            key = (stack, tid, name_coarse_thread(resource), cpu, None, COARSE_LABELS, wait)
            series = groups.setdefault(key, added)
        if series is not added:
            series += added
        elif stack.is_provisional:
            self._unfinished.setdefault((stack, tid), sample)

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
            end_boot_ns: the end of the window; None for the scheduled end.
            counts: the sample counts by kind; each of these kinds has a profile in the window, even
                without samples.
            resolve_again: called for stacks with unresolved frames that may now be resolvable, once
                or twice for each group of equal samples, and more often if the results differ.
                Generated code at the same address has different names in different processes, and
                at different times.
            renew: returns replacements for Resources that have changed since they were first seen.
        """
        interval = self._interval(self.end_boot_ns if end_boot_ns is None else end_boot_ns)
        resources = {resource: resource for groups in self._kinds.values() for resource in groups}
        resources |= {
            resource: resource for kind_counts in counts.values() for resource in kind_counts.waits
        }
        resources |= renew(resources.keys()) if renew else {}
        wait_ends = WaitStacks(self._scheduler_rvas)
        event_ends = TracepointStacks()
        profiles = []
        timer_ns = 1 << max(1, self.period_ns // _TIMES_PER_PERIOD).bit_length() - 1
        for kind in self._all_kinds:
            if kind.name not in counts and kind not in self._kinds:
                continue
            counted = counts.get(kind.name, WindowCounts())
            sampled = self._kinds.get(kind, {})
            ends = wait_ends if kind in KINDS else event_ends
            resolution_ns = timer_ns if kind == ON_CPU else 1
            groups = [
                ResourceSamples(
                    resources[resource],
                    self._samples(
                        self._resolve(sampled.get(resource, {}), resolve_again),
                        interval,
                        ends,
                        resolution_ns,
                    ),
                    counted.waits.get(resource),
                )
                for resource in dict.fromkeys([*sampled, *counted.waits])
            ]
            period_ns = self.period_ns if kind.period_type else 0
            profiles.append(
                Profile(
                    kind,
                    period_ns,
                    groups,
                    counted.taken,
                    counted.lost,
                    counted.totals,
                    counted.threshold_ns,
                    counted.locks,
                )
            )
        self._is_first = self._is_first and not self._kinds
        if self._limit_ns is not None:
            longest_ns = self._schedule.interval_ns
            self._limit_ns = min(2 * self._limit_ns, longest_ns) if self._is_first else None
        self._open(interval.end_boot_ns)
        return Window(interval.start_unix_ns, interval.end_unix_ns, profiles)

    def skip_to(self, boot_ns: int) -> None:
        """Move the start of an empty window forward, for example after a suspend."""
        if not self._kinds and boot_ns > self.start_boot_ns:
            self._open(boot_ns)

    def _interval(self, end_boot_ns: int) -> Interval:
        """Returns the window's interval, extended to include early and late samples."""
        sampled = [group for groups in self._kinds.values() for group in groups.values()]
        start = self.start_boot_ns
        if self._is_first:
            start = min([start, *[series[0] for group in sampled for series in group.values()]])
        last = max([series[-2] for group in sampled for series in group.values()], default=0)
        return self._clock.interval(start, max(end_boot_ns, last + 1))

    def _resolve(
        self, groups: _Group, resolve: Callable[[RawSample], Stack] | None
    ) -> Collection[tuple[_Key, list[int]]]:
        """Returns the groups with resolved stacks; splits groups whose stacks have changed."""
        if resolve is None or not self._unfinished:
            return groups.items()
        resolved: list[tuple[_Key, list[int]]] = []
        for key, series in groups.items():
            sample = self._unfinished.get(key[:2])
            if sample is None:
                resolved.append((key, series))
                continue
            parts = _split(series, sample, resolve)
            resolved += [((stack, *key[1:]), part) for stack, part in parts]
        return resolved

    def _samples(
        self,
        groups: Collection[tuple[_Key, list[int]]],
        interval: Interval,
        ends: WaitStacks | TracepointStacks,
        resolution_ns: int,
    ) -> list[WindowSample]:
        samples, new, pause = [], tuple.__new__, self._pause
        boot_ns = chain.from_iterable([series[::2] for _, series in groups])
        times_unix_ns = interval.to_unix_ns(list(boot_ns), resolution_ns)
        names: dict[bytes, str] = {}
        cuts_all = isinstance(ends, TracepointStacks)
        waits: dict[tuple[Stack, _WaitKey], WindowWait] = {}
        at = 0
        for (stack, tid, comm, cpu, link, labels, key), series in groups:
            if pause:
                pause()
            name = names.get(comm)
            if name is None:
                name = names[comm] = decode_name(comm)
            values = series[1::2]
            count = len(values)
            times = times_unix_ns[at : at + count]
            at += count
            if values.count(1) == count:
                values = []
            wait = None
            if key and not isinstance(key, LockWait):
                wait = waits.get((stack, key))
                if wait is None:
                    cause_stack = stack if self._find_causes else None
                    wait = waits[stack, key] = _window_wait(cause_stack, key)
            if key or cuts_all:
                stack = ends.cut(stack)  # noqa: PLW2901 - the wait's cause is in the part cut off
            of_span, its_labels = self._decode(link, labels) if labels else (link, labels)
            if key and isinstance(key, LockWait):
                its_labels = tuple(sorted((*its_labels, *_lock_labels(key))))
            fields = (stack, tid, name, cpu, of_span, times, values, its_labels, wait)
            samples.append(new(WindowSample, fields))  # three times as fast as WindowSample()
        return samples

    def _decode(
        self, link: SpanLink | None, labels: LabelSet | _Context
    ) -> tuple[SpanLink | None, LabelSet]:
        if not isinstance(labels, _Context):
            return link, labels
        if self._decode_context is None:
            return link, ()
        return self._decode_context(labels.process, labels.encoded, link)


def _split(
    series: list[int], sample: RawSample, resolve: Callable[[RawSample], Stack]
) -> list[tuple[Stack, list[int]]]:
    """Splits the series of samples equal to ``sample`` by their stacks at the samples' times.

    Samples between two samples with the same stack are assumed to have this stack, too.
    """
    first = resolve(sample._replace(time_ns=series[0]))
    if len(series) == _PAIR or resolve(sample._replace(time_ns=series[-2])) is first:
        return [(first, series)]
    middle = len(series) // 4 * 2
    return [*_split(series[:middle], sample, resolve), *_split(series[middle:], sample, resolve)]


def _lock_labels(wait: LockWait) -> LabelSet:
    labels = ((LOCK_TYPE, wait.type),)
    if wait.holder is None:
        return labels
    tid, comm = wait.holder
    return *labels, (LOCK_HOLDER_ID, str(tid)), (LOCK_HOLDER_NAME, decode_name(comm))


def _wait_key(wait: Wait | LockWait) -> _WaitKey | LockWait:
    if isinstance(wait, LockWait):
        return wait
    waker = wait.waker
    return (
        wait.state,
        wait.is_ended,
        wait.in_iowait,
        wait.is_throttled,
        waker and (waker.tgid, waker.tid, waker.comm),
    )


def _window_wait(stack: Stack | None, key: _WaitKey) -> WindowWait:
    state, is_ended, in_iowait, is_throttled, waker = key
    cause = None
    if stack is not None:
        cause = find_stack_cause(state, stack, in_iowait=in_iowait, is_throttled=is_throttled)
    by = WindowWaker(*waker[:2], decode_name(waker[2])) if waker else None
    return WindowWait(state, cause, is_ended, by)


def find_latest(
    resources: Collection[Resource], renewed: Mapping[Resource, Resource]
) -> dict[Resource, Resource]:
    """Maps each Resource to its latest replacement, or to itself if it was not replaced."""
    latest = {}
    for first in resources:
        resource = first
        while resource in renewed:
            resource = renewed[resource]
        latest[first] = resource
    return latest
