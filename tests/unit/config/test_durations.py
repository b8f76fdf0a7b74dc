"""Durations use Go's syntax and require a unit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.config import Duration, parse_duration


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("5s", 5_000_000_000),
        ("1m30s", 90_000_000_000),
        ("1.5h", 5_400_000_000_000),
        (".5s", 500_000_000),
        ("200ms", 200_000_000),
        ("3us", 3000),
        ("3µs", 3000),
        ("3μs", 3000),
        ("7ns", 7),
        ("0.1s", 100_000_000),
        ("0", 0),
        (0, 0),
    ],
)
def test_durations_follow_go_syntax(text, ns):
    assert parse_duration(text) == ns


@pytest.mark.parametrize(
    "value", [5, 1.5, "5", "", "s", "5 s", "-1s", "5d", "1e3s", "٣s", True, None, [], "999999999h"]
)
def test_invalid_durations_are_rejected(value):
    with pytest.raises(ValueError, match="duration"):
        parse_duration(value)


@given(st.integers(0, 2**63 - 1))
def test_formatted_durations_parse_to_the_same_value(ns):
    assert parse_duration(str(Duration(ns))) == ns
