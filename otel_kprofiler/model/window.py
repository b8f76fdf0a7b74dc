"""Windows: the samples of one reporting interval, by resource."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

from otel_kprofiler.model.account import Losses, SampleCounts, StreamTotals
from otel_kprofiler.model.kind import ProfileKind
from otel_kprofiler.model.sample import LabelSet, SpanLink
from otel_kprofiler.model.stack import Stack
from otel_kprofiler.model.wait import WaitState, WaitTotals
from otel_kprofiler.model.wait_cause import WaitCause

AttributeScalar = str | bool | int | float

AttributeValue = AttributeScalar | tuple[AttributeScalar, ...]
"""Supported values of OpenTelemetry attributes."""

Attributes = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """Attributes of a source of samples (an OpenTelemetry Resource); compared by identity."""

    attributes: Attributes
    schema_url: str = ""


class WindowWaker(NamedTuple):
    """The thread that ended a wait; ids as in :class:`otel_kprofiler.model.Waker`."""

    pid: int
    tid: int
    name: str


class WindowWait(NamedTuple):
    """Properties that waits of a window share.

    Attributes:
        state: state of the thread.
        cause: cause; None if not determined.
        is_ended: False for waits that continued when the window ended.
        waker: thread that ended them, if known.
    """

    state: WaitState
    cause: WaitCause | None
    is_ended: bool = True
    waker: WindowWaker | None = None

    @property
    def is_idle(self) -> bool:
        """Returns whether threads without work wait in this way."""
        return self.cause is not None and self.cause.is_idle


class WindowSample(NamedTuple):
    """Samples of a window that are equal except for their time.

    Attributes:
        stack: the resolved stack.
        tid: thread id.
        thread_name: thread name (``comm``).
        cpu: logical CPU.
        link: current span of the thread, if known.
        timestamps_unix_ns: time of each sample; never empty, in order of arrival.
        values: value of each timestamp, in the unit of the profile's kind; empty if all are 1.
        labels: labels that the service set in this context.
        wait: details of waits; None for other kinds.
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
        """Returns whether it is a wait without work; see :class:`WaitCause`."""
        return self.wait is not None and self.wait.is_idle

    @property
    def weight(self) -> int:
        """Returns the sum of the values, in the unit of the profile's kind."""
        return sum(self.values) if self.values else len(self.timestamps_unix_ns)


class ResourceSamples(NamedTuple):
    """All samples of a resource in a window; empty if only the account is reported.

    Attributes:
        resource: source of the samples.
        samples: the samples.
        waits: time of its threads off the CPU in the window, without sampling error; None if
            unknown.
    """

    resource: Resource
    samples: Sequence[WindowSample]
    waits: WaitTotals | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """The samples of one kind in a window.

    Attributes:
        kind: what is sampled.
        period_ns: interval between two samples on a CPU; 0 if the kind has no period.
        resources: the samples by resource; empty if nothing was sampled.
        taken: samples that the kernel program took in the window.
        lost: how many of these were lost before they reached the window, by cause.
        totals: the account of the whole stream, if known.
        threshold_ns: duration from which on each wait is sampled, at the end of the window; 0 if
            unknown, or for kinds other than waits.
    """

    kind: ProfileKind
    period_ns: int
    resources: Sequence[ResourceSamples]
    taken: int = 0
    lost: Losses = field(default_factory=dict)
    totals: StreamTotals | None = None
    threshold_ns: int = 0

    @property
    def waits(self) -> WaitTotals | None:
        """Returns the sums of all resources; None if unknown."""
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

    def measure(self, weight: int) -> int:
        """Returns the total of the values, in the unit of ``kind.measure``."""
        return weight * self.period_ns if self.period_ns else weight


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """One reporting interval.

    Every timestamp of its samples lies in ``[start_unix_ns, end_unix_ns)``. A change of the
    sampling rate closes a window, so that ``period_ns`` holds for all samples of a profile.

    Attributes:
        start_unix_ns: start of the interval.
        end_unix_ns: end of the interval, exclusive.
        profiles: one for each kind that is sampled.
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
        """Returns the window with each sample replaced; timestamps must stay.

        Args:
            change: returns the replacement of a sample.
            pause: called before each sample, to let other threads run.
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
        """Yields each sample of any kind with its resource."""
        for profile in self.profiles:
            yield from profile.samples
