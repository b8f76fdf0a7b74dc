"""Exact counts and durations of kernel lock waits, shown alongside the estimates from samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

from otel_kprofiler.analysis.samples import Samples
from otel_kprofiler.model import UNCOUNTED_LOCK, LockTotals, Profile, ProfileKind, add_lock_totals


class LockSummary(NamedTuple):
    """Totals of the waits for kernel locks.

    Attributes:
        exact: number and total duration of waits by lock type, without sampling error, sorted by
            decreasing duration.
        uncounted: number of waits not in ``exact`` because their start or end was not observed.
    """

    exact: LockTotals
    uncounted: int

    @property
    def waits(self) -> int:
        """Returns the number of waits counted exactly rather than sampled."""
        return sum(total.waits for total in self.exact.values())

    @property
    def total_ns(self) -> int:
        """Returns the total duration of the exactly counted waits, in nanoseconds."""
        return sum(total.total_ns for total in self.exact.values())


def summarize_locks(
    samples: Samples, kind: ProfileKind, processes: Sequence[bool] | None
) -> LockSummary | None:
    """Sums the exactly counted waits for locks in all profiles of one kind.

    Returns None if there are no waits, or if the samples were filtered, because the counters cover
    all processes combined. ``processes`` states, for each Resource, whether it was selected; it is
    None if the samples were also filtered by other criteria.
    """
    if processes is None or not all(processes):
        return None
    profiles = (origin.profile for origin in samples.tables.origins)
    return sum_locks(profile for profile in profiles if profile.kind == kind)


def sum_locks(profiles: Iterable[Profile]) -> LockSummary | None:
    """Returns the sum of the exactly counted lock waits in profiles; None if there were none."""
    totals: LockTotals = reduce(add_lock_totals, (profile.locks for profile in profiles), {})
    if not totals:
        return None
    longest_first = sorted(totals.items(), key=lambda item: -item[1].total_ns)
    exact = {name: total for name, total in longest_first if name != UNCOUNTED_LOCK}
    uncounted = totals.get(UNCOUNTED_LOCK)
    return LockSummary(exact, uncounted.waits if uncounted else 0)
