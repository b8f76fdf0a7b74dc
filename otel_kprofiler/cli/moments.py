"""Times that commands take: from the start of a profile, or by the clock."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, time

import click

from otel_kprofiler.config import parse_duration

_SECOND_NS = 10**9


@dataclass(frozen=True, slots=True)
class Moment:
    """A time of a profile: seconds after its first sample, a time of that day, or a date and time.

    Times without a zone are UTC.
    """

    value: float | time | datetime

    def unix_ns(self, first_unix_ns: int) -> int:
        """Unix time in nanoseconds, in a profile with this first sample."""
        if isinstance(self.value, float):
            return first_unix_ns + round(self.value * _SECOND_NS)
        moment = self.value
        if isinstance(moment, time):
            day = datetime.fromtimestamp(first_unix_ns // _SECOND_NS, tz=UTC)
            moment = datetime.combine(day, moment)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return int(moment.timestamp()) * _SECOND_NS + moment.microsecond * 1000


class MomentType(click.ParamType[Moment]):
    """A duration in Go's syntax or seconds, or a date and time in the form of ISO 8601."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Moment:
        """Convert to a moment; fails with a usage error."""
        if isinstance(value, Moment):
            return value
        text = str(value)
        try:
            if ":" not in text and "T" not in text:
                return Moment(parse_duration(f"{text}s" if text.isdecimal() else text).seconds)
            if "T" in text or "-" in text:
                return Moment(datetime.fromisoformat(text))
            return Moment(time.fromisoformat(text))
        except ValueError:
            self.fail(f"{text!r} is not a time such as 10s, 12:30:05 or 2026-01-31T12:30:05")
