"""Parses ``.gopclntab``, Go's unwind table, and reads machine code from the same file.

Format: ``runtime/symtab.go`` and ``_func`` in ``runtime/runtime2.go`` (Go 1.21 to 1.26). Runs in a
child process, so it imports only a few modules from this package.
"""

import itertools
import mmap
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from otel_kprofiler.unwinding.frame_writing import Segment

TOP_FRAME, WRITES_SP, IN_ASSEMBLY = 1, 2, 4
"""Flags: the function has no caller, makes unrecorded changes to sp, or is written in assembly."""
_HEADER: Final = struct.Struct("<IHBB8Q")
_MAGIC: Final = 0xFFFFFFF1
_ROW: Final = struct.Struct("<II")
_FUNCTION: Final = struct.Struct("<Ii8xI21xB")
_TEXT: Final = struct.Struct("<Q")
_TEXT_AT: Final = 22 * _TEXT.size
"""Offset of ``text`` in Go's ``moduledata``, which begins with a pointer to the table."""
_LONG: Final = 0x80  # set in all bytes of a varint except the last

File = bytes | mmap.mmap
Sizes = Sequence[tuple[int, int]]
"""The frame sizes in a function, each with the code offset up to which it applies."""


class Shape(NamedTuple):
    """Properties shared by functions with the same frame sizes and the usual prologue.

    Attributes:
        size: size of the code in bytes.
        saving_at: offset of ``saving`` in the code.
        saving: required instructions that save the caller's registers; may be empty.
        program: CFA instructions; empty if the unwind rules depend on the function's code.
    """

    size: int
    saving_at: int
    saving: bytes
    program: bytes


class Function(NamedTuple):
    """A function entry: the start, and the offsets of the name and the frame sizes (``pcsp``)."""

    start: int
    name: int
    sizes: int
    flags: int


class Table:
    """Parses ``.gopclntab``. Raises ``ValueError`` if the table is malformed or unsupported.

    ``quantum`` is the size of the smallest instruction, in bytes.
    """

    def __init__(self, data: bytes, quantum: int) -> None:
        if len(data) < _HEADER.size:
            raise ValueError(".gopclntab is shorter than its header")
        magic, _, unit, word, count, _, text, names, *_, sizes, rows = _HEADER.unpack_from(data)
        if (magic, unit, word) != (_MAGIC, quantum, 8):
            raise ValueError(
                f"unsupported .gopclntab header with magic {magic:#x}, quantum {unit} and pointer "
                f"size {word}"
            )
        if max(names, sizes, rows + (count + 1) * _ROW.size) > len(data):
            raise ValueError(".gopclntab is truncated")
        self.data, self._sizes_at, self._rows_at = data, sizes, rows
        self._quantum = quantum
        self.count: int = count
        self.names_at: int = names
        self.text: int = text

    def functions(self, step: int = 1) -> Iterator[tuple[int, int, int, int]]:
        """Returns the fields of every ``step``-th function; see :class:`Function`.

        Raises ``struct.error`` if a row is malformed.
        """
        data, rows_at = self.data, self._rows_at
        rows = struct.unpack_from(f"<{2 * self.count}I", data, rows_at)[1 :: 2 * step]
        return (_FUNCTION.unpack_from(data, rows_at + row) for row in rows)

    def function(self, index: int) -> tuple[int, int, int, int]:
        """Returns the fields of a function. For errors, see :meth:`functions`."""
        _, row = _ROW.unpack_from(self.data, self._rows_at + index * _ROW.size)
        return _FUNCTION.unpack_from(self.data, self._rows_at + row)

    @property
    def layout(self) -> tuple[int, int, int]:
        """Returns the offset of the rows, their number, and the offset of the frame sizes."""
        return self._rows_at, self.count, self._sizes_at

    def number(self, name: bytes) -> int:
        """Returns the offset of a function name; -1 if the table does not contain the name."""
        at = self.data.find(b"\0" + name + b"\0", self.names_at)
        return at + 1 - self.names_at if at >= 0 else -1

    def sizes(self, at: int) -> Sizes:
        """Returns the frame sizes; raises ``IndexError`` or ``ValueError`` if malformed."""
        return parse_sizes(self.data, at + self._sizes_at, self._quantum)

    def packed_sizes(self, at: int) -> bytes:
        """Returns the encoded frame sizes through the first zero byte, usually the terminator."""
        at += self._sizes_at
        return self.data[at : self.data.find(b"\0", at) + 1]


def parse_sizes(data: bytes, at: int, quantum: int) -> Sizes:
    """Parses frame sizes. Raises ``IndexError`` or ``ValueError`` if the sizes are malformed."""
    sizes: list[tuple[int, int]] = []
    size, end = -1, 0
    while True:
        # Most varints are one byte long; a function call for each varint would double the total
        # time.
        change, at = (data[at], at + 1) if data[at] < _LONG else parse_number(data, at)
        if not change and sizes:
            return sizes
        size += change >> 1 ^ -(change & 1)
        length, at = (data[at], at + 1) if data[at] < _LONG else parse_number(data, at)
        end += length * quantum
        sizes.append((end, size))


def parse_number(data: bytes, at: int) -> tuple[int, int]:
    """Parses a varint of up to 32 bits. Returns the value and the offset of the next byte."""
    value = 0
    for shift in range(0, 29, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < _LONG:
            return value, at
    raise ValueError("a number in .gopclntab has more than 32 bits")


class Code:
    """Reads the contents of a file by virtual address."""

    def __init__(self, file: File, segments: Iterable[Segment]) -> None:
        self.file, self.segments = file, tuple(segments)
        self._start = self._end = self._offset = 0  # the segment that was read last

    def read(self, address: int, size: int) -> bytes:
        """Reads at most ``size`` bytes, omitting bytes outside the segments."""
        if not self._start <= address < self._end and not self._select(address):
            return b""
        at = address - self._start + self._offset
        return self.file[at : at + size]

    def is_plain(self, most: int) -> bool:
        """Returns whether there are at most ``most`` segments, and no two of them overlap."""
        rows = sorted(self.segments, key=lambda segment: segment.address)
        ends = itertools.accumulate((row.address + row.size for row in rows), max)
        return len(rows) <= most and all(
            end <= row.address for end, row in zip(ends, rows[1:], strict=False)
        )

    def _select(self, address: int) -> bool:
        for offset, size, start in self.segments:
            if start <= address < start + size:
                self._start, self._end, self._offset = start, start + size, offset
                return True
        return False

    def find_texts(self, table: int) -> Iterator[int]:
        """Yields the ``text`` word of each possible ``moduledata`` that points to the table."""
        wanted = _TEXT.pack(table)
        for segment in self.segments:
            at, end = segment.offset, segment.offset + segment.size
            while (at := self.file.find(wanted, at, end)) >= 0:
                word = self.read(segment.address + at - segment.offset + _TEXT_AT, _TEXT.size)
                if len(word) == _TEXT.size:
                    yield from _TEXT.unpack(word)
                at += len(wanted)
