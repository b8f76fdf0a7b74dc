"""Parameter types shared by commands."""

from collections.abc import Callable
from typing import Final, Generic, TypeVar, cast

import click

from otel_kprofiler.config import parse_duration
from otel_kprofiler.host import parse_cpu_list

_ValueT = TypeVar("_ValueT")


class ParsedType(click.ParamType[_ValueT], Generic[_ValueT]):
    """A Click type whose values are parsed by a function.

    Args:
        name: name of the type. Unless a parameter has a ``metavar``, the help shows the name in
            capitals.
        parse: parses the text, or raises ``ValueError`` with a message for the user.
    """

    def __init__(self, name: str, parse: Callable[[str], _ValueT]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> _ValueT:
        """Convert text, or fail with a usage error. Non-string defaults are not converted."""
        if not isinstance(value, str):
            return cast("_ValueT", value)
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _parse_seconds(text: str) -> float:
    """Parse a duration in Go's syntax or in seconds, or raise ``ValueError``."""
    if text.isdecimal():  # seconds, as in sleep(1)
        text = f"{text}s"
    return parse_duration(text).seconds


def is_duration(text: str) -> bool:
    """Returns whether a text is a duration."""
    try:
        _parse_seconds(text)
    except ValueError:
        return False
    return True


DURATION: Final = ParsedType("duration", _parse_seconds)
CPU_LIST: Final = ParsedType("cpus", parse_cpu_list)
