"""Prints resolved addresses as text or JSON."""

import json
import re
from typing import Any, Final

from otel_kprofiler.cli.terminal import say
from otel_kprofiler.model import Line
from otel_kprofiler.symbols import Resolution

_MAX_NAME_LIKE: Final = 8
_NUMBER: Final = re.compile("(?:0[xX])?[0-9a-fA-F]+")


def print_resolution(answer: Resolution, *, as_json: bool) -> bool:
    """Print a resolved address. Return whether the address has a name."""
    say(json.dumps(as_dict(answer)) if as_json else "\n".join(_text(answer)))
    return bool(answer.lines)


def _text(answer: Resolution) -> list[str]:
    """Formats a line for the address, and a line for each function that has a source line."""
    module = answer.module
    place = f"{module.name}+{answer.frame.address:#x}" if module else answer.path or "unknown"
    build_id = f"build-id {answer.build_id}" if answer.build_id else "no build id"
    name = f"{answer.function}+{answer.offset:#x}" if answer.lines else f"[{_reason(answer)}]"
    text = [f"{answer.address:#x}  {name}  {place}  {build_id}"]
    if any(line.file for line in answer.lines) or len(answer.lines) > 1:
        text += [f"  {_line_text(line)}" for line in answer.lines]
    return text


def _line_text(line: Line) -> str:
    place = line.file or "??"
    return f"{line.function}  {place}:{line.line}" if line.line else f"{line.function}  {place}"


def _reason(answer: Resolution) -> str:
    return answer.unresolved.value if answer.unresolved else ""


def as_dict(answer: Resolution) -> dict[str, Any]:
    """Returns a resolved address as JSON-compatible values, with addresses in hexadecimal."""
    process, module = answer.process, answer.module
    return {
        "address": f"{answer.address:#x}",
        "pid": process and process.tgid,
        "path": answer.path or None,
        "module": module and module.name,
        "build_id": answer.build_id,
        "file_id": (module and module.file_id) or None,
        "module_address": _hexadecimal(answer.module_address),
        "file_offset": _hexadecimal(answer.file_offset),
        "function": answer.function or None,
        "offset": answer.offset,
        "lines": [
            {
                "function": line.function,
                "system_name": line.system_name or None,
                "file": line.file or None,
                "line": line.line or None,
            }
            for line in answer.lines
        ],
        "unresolved": _reason(answer) or None,
    }


def _hexadecimal(number: int | None) -> str | None:
    return None if number is None else f"{number:#x}"


def parse_address(word: str) -> int | None:
    """Parses a hexadecimal number; None if ``word`` might be a name.

    "add" and "face", for example, are valid names and hexadecimal numbers. However, no name starts
    with a digit, and kernel addresses are longer than names of this form.
    """
    if not _NUMBER.fullmatch(word) or not (word[0].isdigit() or len(word) > _MAX_NAME_LIKE):
        return None
    return int(word, 16)
