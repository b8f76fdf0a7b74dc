"""Parses durations in Go's syntax (``1m30s``), as in the Collector's configuration."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

_UNITS_NS: Final = {
    "h": 3_600_000_000_000,
    "m": 60_000_000_000,
    "s": 1_000_000_000,
    "ms": 1_000_000,
    "us": 1_000,
    "ns": 1,
}
_UNIT: Final = "h|ms|m|s|us|µs|μs|ns"  # Go accepts both micro signs
_NUMBER: Final = r"(?:\d+\.?\d*|\.\d+)"
_PART: Final = re.compile(rf"({_NUMBER})({_UNIT})", re.ASCII)
_WHOLE: Final = re.compile(rf"(?:{_NUMBER}(?:{_UNIT}))+", re.ASCII)
_LONGEST_NS: Final = 2**63 - 1


class Duration(int):
    """A duration in nanoseconds; ``str`` formats it in Go's syntax."""

    @property
    def seconds(self) -> float:
        """Returns the duration in seconds."""
        return self / 1e9

    def __str__(self) -> str:
        rest, text = int(self), ""
        for unit, size in _UNITS_NS.items():
            count, rest = divmod(rest, size)
            text += f"{count}{unit}" if count else ""
        return text or "0s"

    __repr__ = __str__

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema  # noqa: PLC0415 - not needed by the command line

        return core_schema.no_info_plain_validator_function(parse_duration)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, _: CoreSchema, __: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "string", "pattern": rf"^(0|({_NUMBER}({_UNIT}))+)$".replace("?:", "")}


def parse_duration(value: object) -> Duration:
    """Parse a duration such as ``200ms``, ``1.5h`` or ``1m30s``.

    Raises ``ValueError`` for anything else: negative durations, durations beyond Go's range (about
    292 years), and numbers other than 0 without a unit.
    """
    if isinstance(value, Duration):
        return value
    if value in (0, "0") and not isinstance(value, bool):
        return Duration(0)
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(  # noqa: TRY004 (pydantic collects ValueErrors)
            f"a duration needs a unit: write {value}s or {value}ms"
        )
    if not isinstance(value, str) or not _WHOLE.fullmatch(value):
        raise ValueError("should be a duration such as 200ms, 5s or 1m30s")
    total = sum(
        Decimal(number) * _UNITS_NS[unit.replace("µ", "u").replace("μ", "u")]
        for number, unit in _PART.findall(value)
    )
    if total > _LONGEST_NS:
        raise ValueError("is longer than the maximum duration of 292 years")
    return Duration(int(total))
