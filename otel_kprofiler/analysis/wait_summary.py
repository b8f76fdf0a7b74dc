"""Estimates off-CPU time from wait samples, for comparison with the exact totals."""

from collections.abc import Sequence
from functools import reduce
from itertools import compress
from math import sqrt
from typing import NamedTuple

from otel_kprofiler.analysis.samples import Samples
from otel_kprofiler.model import NO_WAITS, ProfileKind, WaitTotals


class WaitSummary(NamedTuple):
    """The exact and the estimated off-CPU time of all threads.

    Attributes:
        exact: totals counted by the BPF program; None if samples were filtered by a property, such
            as the stack, that the totals do not record.
        estimate_ns: off-CPU time that the samples represent, in nanoseconds.
        error_ns: upper bound on the standard error of ``estimate_ns``; None if samples were lost,
            because the durations of lost waits are unknown. Waits at or above the threshold
            contribute no error.
        threshold_ns: the largest threshold in any window. Each wait at least this long was sampled.
    """

    exact: WaitTotals | None
    estimate_ns: int
    error_ns: int | None
    threshold_ns: int


def summarize_waits(
    samples: Samples, kind: ProfileKind, processes: Sequence[bool] | None
) -> WaitSummary | None:
    """Returns a summary of the waits for one sample kind; None if there are no exact totals.

    ``processes`` specifies for each Resource whether it was selected; None if samples were also
    filtered by anything other than their process.

    A wait shorter than the threshold is sampled with probability duration / threshold, and then
    counts as a wait of threshold length. The variance of the estimated duration is at most the
    square of the threshold. If a wait yields two samples (asleep, then waiting for a CPU), the
    variance is at most twice the sum of their squared values.
    """
    origins = samples.tables.origins
    wanted = [origin.profile.kind == kind for origin in origins]
    totals = samples.tables.totals
    if not any(wanted[origin] for origin, _ in totals):
        return None
    estimate = variance = 0
    for origin, (start, end) in zip(samples.origins, samples.spans(), strict=True):
        if wanted[origin]:
            threshold_ns = origins[origin].profile.threshold_ns
            values = samples.values[start:end] or [1] * (end - start)
            estimate += sum(values)
            variance += 2 * sum(value * value for value in values if value <= threshold_ns)
    threshold_ns = max(origin.profile.threshold_ns for origin in compress(origins, wanted))
    exact = processes and reduce(
        WaitTotals.plus,
        (counted for (at, owner), counted in totals.items() if wanted[at] and processes[owner]),
        NO_WAITS,
    )
    is_whole = not any(origin.profile.lost for origin in compress(origins, wanted))
    error_ns = round(sqrt(variance)) if is_whole else None
    return WaitSummary(exact or None, estimate, error_ns, threshold_ns)
