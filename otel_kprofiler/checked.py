"""Checks the types of values in untrusted JSON."""

from typing import Any, Final

TOP: Final = (1 << 64) - 1


def checked_number(value: Any, least: int = 0, most: int = TOP) -> int:
    """Returns the value if it is an integer in the given range; raises ``ValueError`` otherwise."""
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{_shown(value)} is not a number from {least} to {most}")
    return value


def checked_text(value: Any) -> str:
    """Returns the value if it is a string; raises ``ValueError`` otherwise."""
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is not a string")  # noqa: TRY004 - bad data, not a defect
    return value


def _shown(value: Any) -> str:
    is_short = isinstance(value, float | bool | type(None)) or (
        isinstance(value, int) and -TOP <= value <= 2 * TOP
    )
    return repr(value) if is_short else f"a {type(value).__name__}"
