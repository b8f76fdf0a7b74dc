"""Rejects profiles with negative values, which reports cannot show."""

from collections.abc import Iterable

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import Window
from otel_kprofiler.text import describe_count


def refuse_negative_values(windows: Iterable[Window]) -> None:
    """Raise ``PayloadError`` if a sample value is negative.

    A profile with negative values is the difference between two profiles. OTLP allows such profiles
    (profiles.proto, ``Sample.values``), but their percentages and flame graphs are meaningless.
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
            "this is the difference between two profiles, with "
            f"{describe_count(negative, 'value')} below 0",
            hint="compare the two profiles themselves: otel-kprofiler diff BEFORE AFTER",
        )
