"""Values of JSON that others wrote, taken only for what they should be."""

from __future__ import annotations

from typing import Any, Final

TOP: Final = (1 << 64) - 1


def checked_number(value: Any, least: int = 0, most: int = TOP) -> int:
    """The value if it is an integer within the bounds.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{_shown(value)} is no number from {least} to {most}")
    return value


def checked_text(value: Any) -> str:
    """The value if it is a text.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is no text")  # noqa: TRY004 - damaged data, no defect
    return value


def _shown(value: Any) -> str:
    is_short = isinstance(value, float | bool | type(None)) or (
        isinstance(value, int) and -TOP <= value <= 2 * TOP
    )
    return repr(value) if is_short else f"a {type(value).__name__}"
