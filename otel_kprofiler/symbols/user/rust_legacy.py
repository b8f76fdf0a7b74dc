"""Demangles Rust's legacy names: ``_ZN…17h<hash>E``."""

import re
from typing import Final

LEGACY: Final = re.compile(r"_?_ZN(.+)17h[0-9a-f]{16}E(?:\..*)?", re.DOTALL)
_ESCAPE: Final = re.compile(r"\$(SP|BP|RF|LT|GT|LP|RP|C|u[0-9a-f]{1,6})\$|\.\.")
_ESCAPED: Final = {
    "SP": "@", "BP": "*", "RF": "&", "LT": "<", "GT": ">", "LP": "(", "RP": ")", "C": ",",
}  # fmt: skip
_LENGTH: Final = re.compile("0|[1-9][0-9]{0,5}")


def demangle_legacy(path: str) -> str | None:
    """Returns the name encoded by the components of a path; None if a component is malformed."""
    parts = []
    at = 0
    while at < len(path):
        digits = _LENGTH.match(path, at)
        if digits is None:
            return None
        at = digits.end() + int(digits[0])
        if at > len(path):
            return None
        part = path[digits.end() : at]
        parts.append(_ESCAPE.sub(_unescape, part[1:] if part.startswith("_$") else part))
    return "::".join(parts)


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if code is None:
        return "::"
    if code not in _ESCAPED:
        char = find_char(int(code[1:], 16))
        return char if char and char.isprintable() else match[0]
    return _ESCAPED[code]


def find_char(code: int) -> str | None:
    """Returns the character for a code point; None for surrogates and values beyond Unicode."""
    is_char = code < 0xD800 or 0xE000 <= code <= 0x10FFFF
    return chr(code) if is_char else None
