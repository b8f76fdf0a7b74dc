"""Significance tests for the difference between two means, and between two counts."""

from math import exp, lgamma, log, log1p, sqrt
from statistics import NormalDist
from typing import Final

_NORMAL: Final = NormalDist()
_EXACT_UP_TO: Final = 2000
_NEGLIGIBLE: Final = 1e-12
_MAX_TERMS: Final = 300


def chance_of_means(
    difference: float, first: tuple[float, int], second: tuple[float, int]
) -> float:
    """Returns the two-sided p-value of the difference between two means (Welch's t-test).

    ``first`` and ``second`` each contain the variance of a mean and the number of observations.
    """
    variance = first[0] + second[0]
    if not variance:
        return 0.0 if difference else 1.0
    parts = (
        variance_of_side * variance_of_side / (count - 1)
        for variance_of_side, count in (first, second)
    )
    freedom = variance * variance / sum(parts)
    square = difference * difference / variance
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + square))


def chance_of_counts(first: int, second: int, share: float) -> float:
    """Returns the two-sided p-value of the difference between two counts (binomial test).

    ``share`` is the expected fraction of all events that are counted in ``first``, from 0 to 1.
    """
    total = first + second
    if not 0 < share < 1 or not total:
        return 1.0
    mean = total * share
    if total > _EXACT_UP_TO:
        distance = abs(first - mean) / sqrt(mean * (1 - share))
        return 2 * _NORMAL.cdf(-distance)
    step = -1 if first <= mean else 1  # direction away from the mean
    tail, at = 0.0, first
    while 0 <= at <= total:
        term = exp(
            lgamma(total + 1) - lgamma(at + 1) - lgamma(total - at + 1)
            + at * log(share) + (total - at) * log1p(-share)
        )  # fmt: skip
        tail += term
        if term < _NEGLIGIBLE * tail:
            break
        at += step
    return min(1.0, 2 * tail)


def margin_factor(freedom: int) -> float:
    """Returns the half-width of a 95 % confidence interval, in standard errors (Student's t).

    Source: Abramowitz and Stegun, formula 26.7.5.
    """
    z = _NORMAL.inv_cdf(0.975)
    return (
        z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    )  # fmt: skip


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Returns the regularized incomplete beta function, by continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a
    # Lentz's method.
    fraction = top = 1.0
    bottom = 0.0
    for term in range(_MAX_TERMS):
        half = term // 2
        if not term:
            factor = 1.0
        elif term % 2:
            factor = -(a + half) * (a + b + half) * x / ((a + term - 1) * (a + term))
        else:
            factor = half * (b - half) * x / ((a + term - 1) * (a + term))
        bottom = 1 / (1 + factor * bottom)
        top = 1 + factor / top
        step = top * bottom
        fraction *= step
        if abs(1 - step) < _NEGLIGIBLE:
            break
    return front * (fraction - 1)
