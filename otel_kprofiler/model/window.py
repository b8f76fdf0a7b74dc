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
"""Values that OpenTelemetry attributes may have here."""

Attributes = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """Attributes of what produced samples (an OpenTelemetry Resource); compared by identity."""

    attributes: Attributes
    schema_url: str = ""


class WindowWaker(NamedTuple):
    """The thread that ended a wait; ids as in :class:`otel_kprofiler.model.Waker`."""

    pid: int
    tid: int
    name: str


class WindowWait(NamedTuple):
    """The properties that waits of a window share.

    Attributes:
        state: of the thread meanwhile.
        cause: what it waited for; None if that was not looked for.
        is_ended: False for waits that went on when the window ended.
        waker: who ended them, if it is known.
    """

    state: WaitState
    cause: WaitCause | None
    is_ended: bool = True
    waker: WindowWaker | None = None

    @property
    def is_idle(self) -> bool:
        """True if threads without work wait in this way."""
        return self.cause is not None and self.cause.is_idle


class WindowSample(NamedTuple):
    """Samples of one window that are equal except for their time.

    Attributes:
        stack: the resolved stack.
        tid: thread id.
        thread_name: thread name (``comm``).
        cpu: logical CPU.
        link: current span of the thread, if known.
        timestamps_unix_ns: when each was taken; never empty, in the order of arrival.
        values: value of each timestamp, in the unit of the profile's kind; empty if all are 1.
        labels: what the service has set in this context.
        wait: of samples of waits, what is known of them.
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
        """True if it is a wait without work; see :class:`WaitCause`."""
        return self.wait is not None and self.wait.is_idle

    @property
    def weight(self) -> int:
        """Sum of the values, in the unit of the profile's kind."""
        return sum(self.values) if self.values else len(self.timestamps_unix_ns)


class ResourceSamples(NamedTuple):
    """All samples of one resource in a window; empty if only the account is reported.

    Attributes:
        resource: what they are of.
        samples: the samples.
        waits: time that its threads were off the CPU in the window, without sampling error; None
            if that is not known.
    """

    resource: Resource
    samples: Sequence[WindowSample]
    waits: WaitTotals | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """The samples of one kind in a window.

    Attributes:
        kind: what is sampled.
        period_ns: distance between two samples of a CPU; 0 when the kind has no period.
        resources: the samples by resource; empty when nothing was sampled.
        taken: samples that the kernel program took in the window.
        lost: how many of those were lost before they reached the window, by cause.
        totals: the account of the whole stream, if it is known.
        threshold_ns: duration from which each wait is sampled, when the window ended; 0 if it is
            not known, or for kinds that are not waits.
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
        """The sums of all resources; None if they are not known."""
        known = [one.waits for one in self.resources if one.waits is not None]
        return reduce(WaitTotals.plus, known) if known else None

    @property
    def samples(self) -> Iterator[tuple[Resource, WindowSample]]:
        """Each sample with its resource."""
        for group in self.resources:
            for sample in group.samples:
                yield group.resource, sample

    @property
    def sample_count(self) -> int:
        """Number of samples (timestamps)."""
        return sum(
            len(sample.timestamps_unix_ns) for group in self.resources for sample in group.samples
        )

    @property
    def weight(self) -> int:
        """Sum of the values of all samples, in the unit of ``kind``."""
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
        """Number of samples (timestamps) of all kinds."""
        return sum(profile.sample_count for profile in self.profiles)

    @property
    def sample_counts(self) -> SampleCounts:
        """Number of samples of each kind."""
        counts = SampleCounts()
        for profile in self.profiles:
            counts[profile.kind.name] += profile.sample_count
        return counts

    def change_samples(
        self,
        change: Callable[[WindowSample], WindowSample],
        pause: Callable[[], None] = lambda: None,
    ) -> Window:
        """The window with another sample for each, whose timestamps must stay.

        Args:
            change: makes the other sample.
            pause: called before each, to let other threads run.
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
        """Each sample of any kind with its resource."""
        for profile in self.profiles:
            yield from profile.samples
