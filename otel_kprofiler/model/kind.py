"""Sample kinds and the meaning of their values."""

from typing import Final, NamedTuple


class ProfileKind(NamedTuple):
    """The kind of a profile's samples.

    Attributes:
        name: identifies the kind in sample counts and in the spool.
        sample_type: what a value counts (OTLP ``sample_type.type``).
        period_type: what a periodic sampler counts between two samples (OTLP ``period_type.type``);
            empty for kinds without a period.
        number: identifies the kind in ring records and recordings; 0 for event kinds, whose numbers
            differ by sampler, and for kinds in other profilers' payloads.
    """

    name: str
    sample_type: str
    sample_unit: str
    period_type: str = ""
    period_unit: str = ""
    number: int = 0

    @property
    def measure(self) -> tuple[str, str]:
        """Returns the type and unit of the period, or of the values if there is no period."""
        if self.period_type:
            return self.period_type, self.period_unit
        return self.sample_type, self.sample_unit

    @property
    def unit(self) -> str:
        """Returns the unit shown for weights, which for counts is ``samples`` or ``events``."""
        unit = self.measure[1]
        if unit != "count":
            return unit
        return "samples" if self.counts_samples else "events"

    @property
    def counts_samples(self) -> bool:
        """Returns whether values count samples, rather than sampled events."""
        return (self.sample_type, self.sample_unit) == ("samples", "count")

    @property
    def is_time(self) -> bool:
        """Returns whether weights are in nanoseconds."""
        return self.measure[1] == "nanoseconds"


ON_CPU: Final = ProfileKind("on_cpu", "samples", "count", "cpu", "nanoseconds", number=1)
"""Periodic on-CPU samples; each counts as 1."""

OFF_CPU: Final = ProfileKind("off_cpu", "off_cpu", "nanoseconds", number=2)
"""Sampled off-CPU waits. A sample's value is the time that the sample represents, as in
opentelemetry-ebpf-profiler."""

LOCK_CONTENTION: Final = ProfileKind("lock_contention", "lock_contention", "nanoseconds")
"""Sampled waits for kernel locks. A sample's value is the wait time that it represents. Lock
contention is an event kind, so the kind's number differs by sampler."""

KINDS: Final = (ON_CPU, OFF_CPU)
"""Sample kinds that every sampler supports. In a window, these kinds come first, in this order."""
