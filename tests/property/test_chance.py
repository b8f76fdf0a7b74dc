"""The p-values of differences match sums and integrals computed term by term."""

from math import comb, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.analysis.chance import chance_of_counts, chance_of_means, margin_factor


@given(st.integers(0, 60), st.integers(0, 60), st.floats(0.05, 0.95))
def test_the_p_value_of_two_counts_is_twice_the_smaller_binomial_tail(first, second, share):
    total = first + second
    terms = [comb(total, n) * share**n * (1 - share) ** (total - n) for n in range(total + 1)]
    expected = min(1.0, 2 * min(sum(terms[: first + 1]), sum(terms[first:])))
    result = chance_of_counts(first, second, share)
    # Near the mean, the larger tail may be chosen; both tails are then close to one half.
    assert result == pytest.approx(expected, rel=1e-6) or min(result, expected) > 0.5


@pytest.mark.parametrize("first", [950, 1100, 1300])
def test_the_normal_approximation_in_chance_of_counts_is_close_to_the_exact_sum(first, monkeypatch):
    exact = chance_of_counts(first, 2000 - first, 0.5)
    monkeypatch.setattr("otel_kprofiler.analysis.chance._EXACT_UP_TO", 1)
    assert chance_of_counts(first, 2000 - first, 0.5) == pytest.approx(exact, rel=0.3)


def student_density(at, freedom):
    """Returns the density of Student's distribution for an even number of degrees of freedom."""
    product = 1 / (2 * sqrt(freedom))
    for number in range(3, freedom, 2):
        product *= number / (number - 1)
    return product * (1 + at * at / freedom) ** (-(freedom + 1) / 2)


@pytest.mark.parametrize("freedom", [4, 22, 46])
@pytest.mark.parametrize("distance", [0.1, 1.0, 2.5, 6.0])
def test_chance_of_means_matches_the_integral_of_students_t_density(freedom, distance):
    steps = 20_000
    width = distance / steps
    inside = 2 * width * sum(student_density((n + 0.5) * width, freedom) for n in range(steps))
    variance = 0.3
    # Two groups of n observations with equal variances have 2 (n - 1) degrees of freedom in total.
    side = variance / 2, freedom // 2 + 1
    result = chance_of_means(distance * sqrt(variance), side, side)
    assert result == pytest.approx(1 - inside, rel=1e-3, abs=1e-7)


def test_any_difference_in_means_is_significant_if_the_variance_is_zero():
    assert chance_of_means(0.0, (0.0, 5), (0.0, 5)) == 1
    assert chance_of_means(1e-9, (0.0, 5), (0.0, 5)) == 0


@pytest.mark.parametrize(("freedom", "expected"), [(10, 2.2281), (22, 2.0739), (46, 2.0129)])
def test_margin_factors_match_the_table_of_students_t_distribution(freedom, expected):
    assert margin_factor(freedom) == pytest.approx(expected, abs=4e-3)
