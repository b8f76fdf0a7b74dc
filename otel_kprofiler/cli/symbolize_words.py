"""Parses the input to ``symbolize``: names with offsets, patterns, and earlier output."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

_PATTERN: Final = re.compile(r"[*?\[]")
_PLACE: Final = re.compile(
    r"(?P<name>.+)\+(?P<offset>0[xX][0-9a-fA-F]+)(?:/(?P<size>0[xX][0-9a-fA-F]+))?"
)
_PRINTED: Final = re.compile(r"(0x[0-9a-f]+|\S+\+0x[0-9a-f]+)  \S")
"""Matches the start of an output line of this command, which users may paste as input."""
_MARK: Final = re.compile(r"\?|\[[^\[\]*]*\]")
"""Matches the marks for unreliable frames (``?``) and modules (``[name]``) in kernel traces."""


class Place(NamedTuple):
    """The name of a function or module, an offset, and the function's size in bytes if given."""

    name: str
    offset: int
    size: int = 0


def parse_place(word: str) -> Place | None:
    """Parses ``vfs_read+0x10`` or ``vfs_read+0x10/0x360``; None for anything else."""
    match = _PLACE.fullmatch(word)
    if match is None:
        return None
    return Place(match["name"], int(match["offset"], 16), int(match["size"] or "0", 16))


def get_fixed_prefix(word: str) -> str | None:
    """Returns the fixed prefix of a pattern (``vfs_*``); None if the word is not a pattern."""
    match = _PATTERN.search(word)
    return word[: match.start()] if match else None


def read_words(lines: Iterable[str]) -> Iterator[str]:
    """Yields the words in ``lines``; from lines printed by this command, only the addresses."""
    is_printed = False
    for line in lines:
        if is_printed and line.startswith("  "):  # a line that --explain or --lines adds
            continue
        match = _PRINTED.match(line)
        is_printed = match is not None
        if match:
            yield match[1]
        elif (address := _read_json(line)) is not None:
            yield address
        else:
            yield from (word for word in line.split() if not _MARK.fullmatch(word))


def _read_json(line: str) -> str | None:
    """Returns the address in a line of ``--json`` output; None for other lines."""
    if not line.startswith("{"):
        return None
    try:
        address = json.loads(line).get("address")
    except ValueError:
        return None
    return address if isinstance(address, str) else None
