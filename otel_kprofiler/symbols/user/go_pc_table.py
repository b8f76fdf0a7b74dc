"""Decodes the Go runtime's pc-value tables."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

_FOREVER: Final = (1 << 64) - 1


class PcTable:
    """A pc-value table, which maps positions in a function to values. Not thread-safe.

    Positions are in units of the code quantum, which is the minimum instruction size. The table is
    a list of varint pairs. Each pair consists of the change in value (zigzag-encoded) and the
    number of positions that have the new value. A change of 0, except in the first pair, ends the
    table. Bytes of ``data`` after the table are ignored.
    """

    __slots__ = ("_ends", "_left", "_values")

    def __init__(self, data: bytes) -> None:
        self._left = iter(data)
        self._ends = array("Q")
        self._values = array("q")

    def find(self, place: int) -> int:
        """Returns the value at a position; -1 if the table has no value for it.

        Raises ``StopIteration`` if the table extends beyond ``data``.
        """
        ends, values, left = self._ends, self._values, self._left
        if ends and place < ends[-1]:
            return values[bisect_right(ends, place)]
        value, end = (values[-1], ends[-1]) if ends else (-1, 0)
        while place >= end:
            delta = next(left)
            if delta & 0x80:
                delta = _read_long_number(delta, left)
            elif not delta and ends:
                ends.append(_FOREVER)
                values.append(-1)
                return -1
            value += -(delta >> 1) - 1 if delta & 1 else delta >> 1
            step = next(left)
            end += step if step < 0x80 else _read_long_number(step, left)
            ends.append(end)
            values.append(value)
        return value


def _read_long_number(byte: int, left: Iterator[int]) -> int:
    """Reads a varint of up to 32 bits. Raises ``StopIteration`` if the varint is truncated."""
    value = byte & 0x7F
    for shift in range(7, 35, 7):
        byte = next(left)
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            break
    return value & 0xFFFFFFFF
