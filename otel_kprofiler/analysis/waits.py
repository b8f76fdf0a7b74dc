"""What samples of waits add up to, beside the exact totals that were counted."""

from __future__ import annotations

from functools import reduce
from itertools import compress
from math import sqrt
from typing import NamedTuple

from otel_kprofiler.analysis.samples import Samples
from otel_kprofiler.model import ProfileKind, WaitTotals


class WaitSummary(NamedTuple):
    """Time off the CPU of all threads.

    Attributes:
        exact: the totals that the kernel program counted.
        estimate_ns: the same by the samples.
        error_ns: at most the standard error of that: waits from the threshold on have none.
        threshold_ns: duration from which each wait was sampled; the longest of all windows.
    """

    exact: WaitTotals
    estimate_ns: int
    error_ns: int
    threshold_ns: int


def summarize_waits(samples: Samples, kind: ProfileKind) -> WaitSummary | None:
    """The waits of a kind; None if their totals are not known.

    A wait that is shorter than the threshold stands for the threshold, with the chance that makes
    up for it. Its variance is at most the square of that, and of two parts of a wait, asleep and
    waiting for a CPU, at most twice the sum of their squares.
    """
    origins = samples.tables.origins
    wanted = [origin.profile.kind == kind for origin in origins]
    known = [totals for (origin, _), totals in samples.tables.totals.items() if wanted[origin]]
    if not known:
        return None
    estimate = variance = 0
    for origin, (start, end) in zip(samples.origins, samples.spans(), strict=True):
        if wanted[origin]:
            threshold_ns = origins[origin].profile.threshold_ns
            values = samples.values[start:end] or [1] * (end - start)
            estimate += sum(values)
            variance += 2 * sum(value * value for value in values if value <= threshold_ns)
    threshold_ns = max(one.profile.threshold_ns for one in compress(origins, wanted))
    exact = reduce(WaitTotals.plus, known)
    return WaitSummary(exact, estimate, round(sqrt(variance)), threshold_ns)
