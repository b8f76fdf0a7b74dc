"""Source lines of CPython's instructions, from the location tables of code objects.

The format is that of CPython 3.11 and later: ``Objects/locations.md`` (3.11, 3.12) and
``InternalDocs/code_objects.md`` (3.13 and later) of its source. Tables are untrusted: damage ends
the lines at the place where it is.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

NO_LINE: Final = 0
"""The instruction has no line, or none that is known."""
_MAX_LINE: Final = (1 << 31) - 1
_MAX_PIECES: Final = 6
"""Six bits each: as many as 32-bit numbers need."""
_FIRST_ONE_LINE, _LAST_ONE_LINE, _NO_COLUMNS, _LONG, _NONE = 10, 12, 13, 14, 15
"""Kinds of entries; those below have their columns in one further byte, and no new line."""


class LineTable(NamedTuple):
    """Lines of a code object; immutable, and without references to it.

    Attributes:
        starts: the first instruction of each run of instructions with one line, in code units.
        lines: of each run, 1-based, or :data:`NO_LINE`.
        end: the number of instructions that the table covers.
    """

    starts: array[int]
    lines: array[int]
    end: int

    def line(self, instruction: int) -> int:
        """The line of an instruction, or :data:`NO_LINE`."""
        if not 0 <= instruction < self.end:
            return NO_LINE
        return self.lines[bisect_right(self.starts, instruction) - 1]


def parse_line_table(table: bytes, first_line: int) -> LineTable:
    """Decode ``co_linetable``.

    Args:
        table: the bytes; may be cut off or damaged, what comes before is used.
        first_line: ``co_firstlineno``.
    """
    starts, lines = array("I"), array("I")
    end = 0
    for length, line in _read_entries(table, first_line):
        if not lines or lines[-1] != line:
            starts.append(end)
            lines.append(line)
        end += length
    return LineTable(starts, lines, end)


def _read_entries(table: bytes, line: int) -> Iterator[tuple[int, int]]:
    """Instructions of each entry, and their line."""
    at, size = 0, len(table)
    while at < size:
        head = table[at]
        if not head & 0x80:
            return  # every entry begins with a byte like this, and has no other
        kind, length = head >> 3 & 15, (head & 7) + 1
        at += 1
        start = at
        while at < size and not table[at] & 0x80:
            at += 1
        if _FIRST_ONE_LINE <= kind <= _LAST_ONE_LINE:
            line += kind - _FIRST_ONE_LINE
        elif kind in (_NO_COLUMNS, _LONG):
            delta = _read_signed(table, start, at)
            if delta is None:
                return
            line += delta
        yield length, line if kind != _NONE and 0 < line <= _MAX_LINE else NO_LINE


def _read_signed(table: bytes, at: int, end: int) -> int | None:
    """A number in pieces of six bits, lowest first, its sign in the lowest bit; None if damaged."""
    value = 0
    for piece in range(_MAX_PIECES):
        if at + piece >= end:
            return None
        byte = table[at + piece]
        value |= (byte & 63) << 6 * piece
        if not byte & 64:
            return -(value >> 1) if value & 1 else value >> 1
    return None
