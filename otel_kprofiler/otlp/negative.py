"""Refuses profiles with negative values, which reports of time cannot show."""

from __future__ import annotations

from collections.abc import Iterable

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import Window
from otel_kprofiler.text import describe_count


def refuse_negative_values(windows: Iterable[Window]) -> None:
    """Refuse windows in which the value of a sample is negative.

    Such a profile is the difference of two. OTLP allows it (profiles.proto, ``Sample.values``), but
    shares of its total, and the widths of a flame graph, mean nothing.

    Raises:
        PayloadError: there is a negative value.
    """
    negative = sum(
        value < 0
        for window in windows
        for profile in window.profiles
        for _, sample in profile.samples
        for value in sample.values
    )
    if negative:
        raise PayloadError(
            f"{describe_count(negative, 'value')} below 0: the difference of two profiles",
            hint="compare the two profiles themselves: otel-kprofiler diff BEFORE AFTER",
        )
