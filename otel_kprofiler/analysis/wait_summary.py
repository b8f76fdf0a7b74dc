"""Sums of the samples of waits, beside the exact totals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import compress
from math import sqrt
from typing import NamedTuple

from otel_kprofiler.analysis.samples import Samples
from otel_kprofiler.model import NO_WAITS, ProfileKind, WaitTotals


class WaitSummary(NamedTuple):
    """Time off the CPU of all threads.

    Attributes:
        exact: the totals that the kernel program counted; None where samples were chosen by
            something that the totals lack, such as their stacks.
        estimate_ns: the time of the samples.
        error_ns: at most the standard error of that: waits from the threshold on have none. None
            if samples were lost: how much they stood for is not known.
        threshold_ns: duration from which each wait was sampled; the longest of all windows.
    """

    exact: WaitTotals | None
    estimate_ns: int
    error_ns: int | None
    threshold_ns: int


def summarize_waits(
    samples: Samples, kind: ProfileKind, processes: Sequence[bool] | None
) -> WaitSummary | None:
    """The waits of a kind; None if their totals are not known.

    Args:
        samples: those that were chosen.
        kind: of waits.
        processes: which resources were chosen, by their index, if they alone were; None if samples
            were chosen by something else.

    A wait that is shorter than the threshold stands for the threshold, with the chance that makes
    up for it. Its variance is at most the square of that, and of two parts of a wait, asleep and
    waiting for a CPU, at most twice the sum of their squares.
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
    threshold_ns = max(one.profile.threshold_ns for one in compress(origins, wanted))
    exact = processes and reduce(
        WaitTotals.plus,
        (one for (at, owner), one in totals.items() if wanted[at] and processes[owner]),
        NO_WAITS,
    )
    is_whole = not any(one.profile.lost for one in compress(origins, wanted))
    error_ns = round(sqrt(variance)) if is_whole else None
    return WaitSummary(exact or None, estimate, error_ns, threshold_ns)
