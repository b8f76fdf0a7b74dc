"""Generates CFA programs for Go functions on x86-64 directly from Go's frame size tables.

Most functions have no frame on entry, and frame sizes are never negative. For these functions, this
module generates the same programs as ``make_rows`` of go_x86.py, but decodes each combination of
frame size and change only once. This module runs in a child process, and therefore imports only a
few modules of this package.
"""

from __future__ import annotations

import re
from typing import Final

from otel_kprofiler.unwinding.frame_writing import PADDINGS, RBP_KEPT, advance, pack_number
from otel_kprofiler.unwinding.go_table import Shape, parse_number

_CFA_OFFSET: Final = b"\x0e"  # def_cfa_offset
_SAVED: Final = b"\x86\2"  # offset rbp 2: at CFA - 16
PUSH: Final = b"\x55"  # push %rbp
_FIRST: Final = b"\2"
"""The first change in the frame size, from -1 to 0."""
_VARINT: Final = rb"[\x80-\xff]*[\x00-\x7f]"
_STEP: Final = re.compile(
    b"(" + _VARINT + b")(" + _VARINT + rb"(?:[\x01-\x0f]\x0f\x01" + _VARINT + b")?)"
)
"""The distance to the next frame size change, followed by the change itself. A change may be
combined with a subsequent return (which pops rbp: change -8) and the change after the return. The
table ends with a change of 0."""
_MAX_KEPT: Final = 1 << 16
"""Maximum number of entries in the cache of changes, and in the cache of distances."""


class _Unusual(Exception):  # noqa: N818 - an outcome
    """Raised if frame sizes are negative or malformed."""


class _Distances(dict[bytes, "tuple[int, bytes]"]):
    """Distances between changes, each with the CFA instruction that advances by that distance."""

    def __missing__(self, packed: bytes) -> tuple[int, bytes]:
        (distance,) = _parse(packed)
        if len(self) >= _MAX_KEPT:
            self.clear()
        self[packed] = distance, advance(distance)
        return self[packed]


class _Changes(dict[bytes, "tuple[int, bytes, _Changes]"]):
    """Caches changes from a frame size as (distance in bytes, CFA instructions, next changes)."""

    def __init__(self, size: int, maker: StepMaker) -> None:
        super().__init__()
        self._size, self._maker = size, maker

    def __missing__(self, packed: bytes) -> tuple[int, bytes, _Changes]:
        change = self[packed] = self._maker.make(self._size, packed)
        return change


class StepMaker:
    """Generates CFA programs, and caches their instructions for reuse in later functions."""

    def __init__(self) -> None:
        self._distances = _Distances()
        self._changes: dict[int, _Changes] = {}
        self._first = self._find(0)
        self._end = _Changes(-1, self)
        self._count = 0

    def find(self, packed: bytes) -> Shape | None:
        """Returns the shape of packed sizes; None if it is unusual or the first size is not 0.

        ``packed`` must not contain a zero byte, except as its last byte.
        """
        if not packed.startswith(_FIRST):
            return None
        if self._count >= _MAX_KEPT:
            self._clear()
        changes, distances = self._first, self._distances
        size = 0
        parts: list[bytes] = []
        try:
            steps = _STEP.findall(packed, 1)
            for packed_distance, packed_change in steps:
                distance, advancing = distances[packed_distance]
                more, part, changes = changes[packed_change]
                size += distance + more
                parts += advancing, part
        except _Unusual:
            return None
        if changes is not self._end:
            return None
        if not part:
            del parts[-2]  # omit the last advance: nothing changes at the function's end
        program = b"".join(parts)
        saving = PUSH if program else b""
        first, _ = distances[steps[0][0]]
        return Shape(size, first - 1, saving, program + PADDINGS[len(program) & 3])

    def make(self, size: int, packed: bytes) -> tuple[int, bytes, _Changes]:
        """Generates CFA instructions for packed changes that start from a frame of ``size`` bytes.

        Raises ``_Unusual`` if a size is negative.
        """
        self._count += 1
        distance = 0
        parts: list[bytes] = []
        numbers = _parse(packed)
        for number, length in zip(numbers[::2], (0, *numbers[1::2]), strict=True):
            distance += length
            if not number:
                return distance, b"".join(parts), self._end
            after = size + (number >> 1 ^ -(number & 1))
            if after < 0:
                raise _Unusual
            parts += advance(length), change_frame(size, after)
            size = after
        return distance, b"".join(parts), self._find(size)

    def _clear(self) -> None:
        for changes in self._changes.values():
            changes.clear()  # breaks reference cycles, because the garbage collector is disabled
        self._changes.clear()
        self._count = 0
        self._first = self._find(0)

    def _find(self, size: int) -> _Changes:
        if (changes := self._changes.get(size)) is None:
            changes = self._changes[size] = _Changes(size, self)
        return changes


def change_frame(size: int, after: int, *, saves: bool = True) -> bytes:
    """Encodes the CFA instructions that change the frame size to ``after`` bytes.

    ``saves`` states whether the caller's rbp is saved at the top of each frame.
    """
    code = _CFA_OFFSET + pack_number(after + 8)
    if saves and not (size and after):
        code += _SAVED if after else RBP_KEPT
    return code


def _parse(packed: bytes) -> list[int]:
    """Parses consecutive varints. Raises ``_Unusual`` if a number exceeds 32 bits."""
    numbers, at = [], 0
    try:
        while at < len(packed):
            number, at = parse_number(packed, at)
            numbers.append(number)
    except ValueError:
        raise _Unusual from None
    return numbers
