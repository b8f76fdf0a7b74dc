"""Decodes source lines from the location tables of CPython code objects.

CPython 3.11 and later use this format, which is described in CPython's ``Objects/locations.md``
(3.11, 3.12) and ``InternalDocs/code_objects.md`` (3.13 and later). The tables are untrusted input.
Decoding stops at the first malformed entry.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from itertools import accumulate
from typing import Final, NamedTuple

NO_LINE: Final = 0
"""Line number of an instruction without a known line."""
_MAX_LINE: Final = (1 << 31) - 1
_FIRST_ONE_LINE, _LAST_ONE_LINE, _NONE = 10, 12, 15
"""Line table entries of kinds 10 to 12 advance the line number by ``kind - 10``. Entries of kinds
13 and 14 store the number of lines to advance.
"""


def _kind(head: int) -> int:
    """Returns an entry's kind from its first byte, the only byte with the highest bit set."""
    return head >> 3 & 15 if head & 0x80 else -1


# Tables for bytes.translate, which map the first bytes of entries to properties without a loop.
_BYTES: Final = range(256)
_FOLLOWING: Final = bytes(range(0x80))
_LENGTHS: Final = bytes([(head & 7) + 1 for head in _BYTES])
_LINES: Final = bytes(
    [max(0, _kind(b) - _FIRST_ONE_LINE) if _kind(b) <= _LAST_ONE_LINE else 0 for b in _BYTES]
)
_WITHOUT_NUMBER: Final = bytes([head for head in _BYTES if not 0xE8 <= head <= 0xF7])

# Varints: six bits per byte, lowest first; 0x40 marks continuation. Bit 0 is the sign bit.
_NUMBER: Final = rb"[\x40-\x7f]{0,5}[\x00-\x3f]"
_NUMBERS: Final = re.compile(rb"[\xe8-\xf7](" + _NUMBER + rb")")  # entries of kinds 13 and 14
_DAMAGE: Final = re.compile(rb"[\xe8-\xf7](?!" + _NUMBER + rb")")


class LineTable(NamedTuple):
    """The lines of a code object; immutable.

    Attributes:
        heads: the first byte of each entry.
        ends: for each entry, the end of its instructions, in code units.
        lines: running sums of the first line and the line changes in entries of kinds 13 and 14.
            :meth:`line` adds the line changes in entries of all other kinds.
    """

    heads: bytes
    ends: array[int]
    lines: array[int]

    @property
    def end(self) -> int:
        """Returns the number of code units that the table covers."""
        return self.ends[-1] if self.ends else 0

    def line(self, instruction: int) -> int:
        """Returns the 1-based line of an instruction, or :data:`NO_LINE`."""
        if not 0 <= instruction < self.end:
            return NO_LINE
        entry = bisect_right(self.ends, instruction)
        if _kind(self.heads[entry]) == _NONE:
            return NO_LINE
        heads = self.heads[: entry + 1]
        numbers = len(heads.translate(None, _WITHOUT_NUMBER))
        line = self.lines[numbers] + sum(heads.translate(_LINES))
        return line if 0 < line <= _MAX_LINE else NO_LINE


def parse_line_table(table: bytes, first_line: int) -> LineTable:
    """Decodes ``co_linetable``, up to the first truncated or malformed entry.

    ``first_line`` is ``co_firstlineno``, a 32-bit number.
    """
    if table and not table[0] & 0x80:
        table = b""
    heads = table.translate(None, _FOLLOWING)
    numbers = _NUMBERS.findall(table)
    if len(numbers) < len(heads.translate(None, _WITHOUT_NUMBER)):
        damage = _DAMAGE.search(table)
        return parse_line_table(table[: damage.start() if damage else 0], first_line)
    ends = array("I", accumulate(heads.translate(_LENGTHS)))
    values = map(_VALUES.__getitem__, numbers)
    lines = array("q", accumulate(values, initial=first_line))
    return LineTable(heads, ends, lines)


class _Values(dict[bytes, int]):
    """Caches varints by their encoded bytes. Long varints are rare, and are not cached."""

    def __missing__(self, number: bytes) -> int:
        value = 0
        for place, byte in enumerate(number):
            value |= (byte & 63) << 6 * place
        return -(value >> 1) if value & 1 else value >> 1


_VALUES: Final = _Values()
_VALUES.update({number: _VALUES[number] for number in map(bytes, zip(range(64), strict=True))})
