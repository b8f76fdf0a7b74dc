"""Exact counts and times of waits for locks, shown beside the estimates from samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

from otel_kprofiler.analysis.samples import Samples
from otel_kprofiler.model import UNCOUNTED_LOCK, LockTotals, Profile, ProfileKind, add_lock_totals


class LockSummary(NamedTuple):
    """Waits for the kernel's locks.

    Attributes:
        exact: number and total time of waits by type of lock, without sampling error; sorted by
            time, longest first.
        uncounted: number of waits whose beginning or end could not be followed.
    """

    exact: LockTotals
    uncounted: int

    @property
    def waits(self) -> int:
        """Returns the number of waits."""
        return sum(total.waits for total in self.exact.values())

    @property
    def total_ns(self) -> int:
        """Returns the total time of the waits, in nanoseconds."""
        return sum(total.total_ns for total in self.exact.values())


def summarize_locks(
    samples: Samples, kind: ProfileKind, processes: Sequence[bool] | None
) -> LockSummary | None:
    """Summarizes the exactly counted waits in the profiles of one kind.

    Returns None if there are no waits. Also returns None if the samples were filtered, because the
    exact waits are counted for all processes together.

    Args:
        samples: the selected samples.
        kind: the kind of samples.
        processes: whether each resource was selected, by index; None if samples were filtered by
            anything but processes.
    """
    if processes is None or not all(processes):
        return None
    profiles = (origin.profile for origin in samples.tables.origins)
    return sum_locks(profile for profile in profiles if profile.kind == kind)


def sum_locks(profiles: Iterable[Profile]) -> LockSummary | None:
    """Sums the exactly counted waits in profiles; None if there are none."""
    totals: LockTotals = reduce(add_lock_totals, (profile.locks for profile in profiles), {})
    if not totals:
        return None
    longest_first = sorted(totals.items(), key=lambda item: -item[1].total_ns)
    exact = {name: total for name, total in longest_first if name != UNCOUNTED_LOCK}
    uncounted = totals.get(UNCOUNTED_LOCK)
    return LockSummary(exact, uncounted.waits if uncounted else 0)
