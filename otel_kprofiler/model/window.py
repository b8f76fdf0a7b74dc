"""Windows: the samples from a reporting interval, grouped by kind and Resource."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

from otel_kprofiler.model.account import Losses, SampleCounts, StreamTotals
from otel_kprofiler.model.kind import ProfileKind
from otel_kprofiler.model.lock import LockTotals
from otel_kprofiler.model.sample import LabelSet, SpanLink
from otel_kprofiler.model.stack import Stack
from otel_kprofiler.model.wait import WaitState, WaitTotals
from otel_kprofiler.model.wait_cause import WaitCause

AttributeScalar = str | bool | int | float

AttributeValue = AttributeScalar | tuple[AttributeScalar, ...]
"""Supported OpenTelemetry attribute values."""

Attributes = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """Attributes of a sample source (an OpenTelemetry Resource); compared by identity."""

    attributes: Attributes
    schema_url: str = ""


class WindowWaker(NamedTuple):
    """The thread that ended a wait; its ids are those of :class:`otel_kprofiler.model.Waker`."""

    pid: int
    tid: int
    name: str


class WindowWait(NamedTuple):
    """Properties shared by waits in a window.

    ``cause`` is None until it is determined. ``is_ended`` is False for waits that were still in
    progress at the end of the window.
    """

    state: WaitState
    cause: WaitCause | None
    is_ended: bool = True
    waker: WindowWaker | None = None

    @property
    def is_idle(self) -> bool:
        """Returns whether a thread was only waiting for work."""
        return self.cause is not None and self.cause.is_idle


class WindowSample(NamedTuple):
    """Samples in a window that differ only in their times and values.

    Attributes:
        timestamps_unix_ns: time of each sample, in order of arrival; never empty.
        values: value at each timestamp, in the unit of the profile's kind; empty if all are 1.
        labels: labels that the service set in the sampled context.
        wait: details of the waits; None for other kinds of samples.
    """

    stack: Stack
    tid: int
    thread_name: str
    cpu: int
    link: SpanLink | None
    timestamps_unix_ns: Sequence[int]
    values: Sequence[int] = ()
    labels: LabelSet = ()
    wait: WindowWait | None = None

    @property
    def is_idle(self) -> bool:
        """Returns whether the samples are from a thread that was only waiting for work."""
        return self.wait is not None and self.wait.is_idle

    @property
    def weight(self) -> int:
        """Returns the sum of the values, in the unit of the profile's kind."""
        return sum(self.values) if self.values else len(self.timestamps_unix_ns)


class ResourceSamples(NamedTuple):
    """A resource's distinct samples in a window; ``samples`` may be empty.

    ``waits`` is the exact off-CPU time of the resource's threads; None if
    unknown.
    """

    resource: Resource
    samples: Sequence[WindowSample]
    waits: WaitTotals | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """The samples of one kind in a window.

    Attributes:
        period_ns: sampling interval on each CPU; 0 if the kind has no period.
        resources: samples by resource; empty if nothing was sampled.
        taken: samples taken by the BPF program in the window.
        lost: taken samples that were lost before they reached the window, by cause.
        totals: cumulative counts of the stream, if known.
        threshold_ns: minimum duration at which every wait is sampled, as of the end of the window;
            0 if unknown, or for kinds other than waits.
        locks: totals of all kernel lock waits completed in the window; empty for other kinds.
    """

    kind: ProfileKind
    period_ns: int
    resources: Sequence[ResourceSamples]
    taken: int = 0
    lost: Losses = field(default_factory=dict)
    totals: StreamTotals | None = None
    threshold_ns: int = 0
    locks: LockTotals = field(default_factory=dict)

    @property
    def waits(self) -> WaitTotals | None:
        """Returns the wait totals over all resources; None if unknown."""
        totals = [resource.waits for resource in self.resources if resource.waits is not None]
        return reduce(WaitTotals.plus, totals) if totals else None

    @property
    def samples(self) -> Iterator[tuple[Resource, WindowSample]]:
        """Yields each sample with its resource."""
        for group in self.resources:
            for sample in group.samples:
                yield group.resource, sample

    @property
    def sample_count(self) -> int:
        """Returns the number of samples (timestamps)."""
        return sum(
            len(sample.timestamps_unix_ns) for group in self.resources for sample in group.samples
        )

    @property
    def weight(self) -> int:
        """Returns the sum of the values of all samples, in the unit of ``kind``."""
        return sum(sample.weight for _, sample in self.samples)

    def select(self, resources: Sequence[ResourceSamples]) -> Profile:
        """Returns a profile with some of the samples. Its counts cover only these samples."""
        selected = replace(self, resources=resources, lost={}, totals=None, locks={})
        return replace(selected, taken=selected.sample_count)

    def measure(self, weight: int) -> int:
        """Returns a weight converted to the unit of ``kind.measure``."""
        return weight * self.period_ns if self.period_ns else weight


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """A reporting interval, with a profile for each kind that was sampled.

    All sample timestamps are in ``[start_unix_ns, end_unix_ns)``. Changing the sampling rate closes
    a window, so that ``period_ns`` applies to all samples in a profile.
    """

    start_unix_ns: int
    end_unix_ns: int
    profiles: Sequence[Profile]

    @property
    def sample_count(self) -> int:
        """Returns the number of samples (timestamps) of all kinds."""
        return sum(profile.sample_count for profile in self.profiles)

    @property
    def sample_counts(self) -> SampleCounts:
        """Returns the number of samples of each kind."""
        counts = SampleCounts()
        for profile in self.profiles:
            counts[profile.kind.name] += profile.sample_count
        return counts

    def change_samples(
        self,
        change: Callable[[WindowSample], WindowSample],
        pause: Callable[[], None] = lambda: None,
    ) -> Window:
        """Returns the window with ``change`` applied to each sample.

        ``change`` must not alter the timestamps. ``pause`` is called before each sample is changed,
        to let other threads run.
        """

        def gently(sample: WindowSample) -> WindowSample:
            pause()
            return change(sample)

        profiles = [
            replace(
                profile,
                resources=[
                    group._replace(samples=list(map(gently, group.samples)))
                    for group in profile.resources
                ],
            )
            for profile in self.profiles
        ]
        return replace(self, profiles=profiles)

    @property
    def samples(self) -> Iterator[tuple[Resource, WindowSample]]:
        """Yields the samples of all kinds, each with its Resource."""
        for profile in self.profiles:
            yield from profile.samples
