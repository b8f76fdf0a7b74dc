"""Parameter types that commands share."""

import click

from otel_kprofiler.config import parse_duration
from otel_kprofiler.host import parse_cpu_list


class DurationType(click.ParamType[float]):
    """The Click type for durations in Go's syntax or in seconds. The value is in seconds."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Convert a duration to seconds, or fail with a usage error if it is malformed."""
        if isinstance(value, float):
            return value
        try:
            return _parse_seconds(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def is_duration(text: str) -> bool:
    """Returns whether a text is a duration."""
    try:
        _parse_seconds(text)
    except ValueError:
        return False
    return True


def _parse_seconds(value: object) -> float:
    if isinstance(value, str) and value.isdecimal():  # seconds, as in sleep(1)
        value = f"{value}s"
    return parse_duration(value).seconds


class CpuListType(click.ParamType[tuple[int, ...]]):
    """The Click type for CPU lists, such as ``0-3,8``."""

    name = "cpus"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Convert a list to CPU numbers, or fail with a usage error if it is malformed."""
        if isinstance(value, tuple):
            return value
        try:
            return parse_cpu_list(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
