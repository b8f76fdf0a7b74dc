"""Parses command-line times: clock times, or times relative to a profile."""

from dataclasses import dataclass
from datetime import UTC, datetime, time
from math import copysign
from typing import Final

from otel_kprofiler.cli.types import ParsedType
from otel_kprofiler.config import parse_duration

_SECOND_NS = 10**9


@dataclass(frozen=True, slots=True)
class Moment:
    """A time in a profile: seconds after its first sample, a time of day, or a date and time.

    Negative seconds count back from the profile's end. Times without a time zone are in UTC.
    """

    value: float | time | datetime

    @property
    def is_from_start(self) -> bool:
        """Returns whether the moment is relative to the profile's first sample."""
        return isinstance(self.value, float) and copysign(1, self.value) > 0

    def unix_ns(self, first_unix_ns: int, end_unix_ns: int) -> int:
        """Returns the moment as Unix time, given the profile's first sample time and end time.

        A time of day refers to the day of the first sample.
        """
        if isinstance(self.value, float):
            begin = first_unix_ns if self.is_from_start else end_unix_ns
            return max(0, begin + round(self.value * _SECOND_NS))
        moment = self.value
        if isinstance(moment, time):
            day = datetime.fromtimestamp(first_unix_ns // _SECOND_NS, tz=UTC)
            moment = datetime.combine(day, moment)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return int(moment.timestamp()) * _SECOND_NS + moment.microsecond * 1000


def parse_moment(text: str) -> Moment:
    """Parse an ISO 8601 time, or a duration in Go's syntax or in seconds, which may be negative.

    Raises ``ValueError`` if the text is not a time.
    """
    try:
        if ":" not in text and "T" not in text:
            sign, plain = (-1, text[1:]) if text.startswith("-") else (1, text)
            duration = parse_duration(f"{plain}s" if plain.isdecimal() else plain)
            return Moment(copysign(duration.seconds, sign))
        if "T" in text or "-" in text:
            return Moment(datetime.fromisoformat(text))
        return Moment(time.fromisoformat(text))
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time; use, for example, 10s, -1h, 12:30:05 or 2026-01-31T12:30:05"
        ) from None


MOMENT: Final = ParsedType("time", parse_moment)
