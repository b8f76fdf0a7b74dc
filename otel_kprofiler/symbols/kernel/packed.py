"""Names in compressed blocks: a third of the memory, for some microseconds per look-up.

Stands where a table has the ``bytes`` of its names: it can be sliced and searched.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from io import BytesIO
from typing import Final

BLOCK_BYTES: Final = 2048
"""Bytes of names in a block: what one look-up decompresses."""

_RAW = -11  # deflate without header and checksum, in a window of 2 KiB
_LEVEL = 6
_MEMORY = 5  # of zlib, which is 0.25 MB for each block by default


class PackedNames:
    """Immutable, so safe to read from any thread.

    Args:
        blocks: the compressed blocks, one after the other.
        ends: where each ends.
        size: bytes of the names.
    """

    __slots__ = ("_blocks", "_ends", "_size")

    def __init__(self, blocks: bytes, ends: array[int], size: int) -> None:
        self._blocks = blocks
        self._ends = ends
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, span: slice) -> bytes:
        start, stop, _ = span.indices(self._size)
        if start >= stop:
            return b""
        first = start // BLOCK_BYTES
        names = self._unpack(first)
        for block in range(first + 1, -(-stop // BLOCK_BYTES)):
            names += self._unpack(block)
        return names[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def find(self, text: bytes, start: int = 0) -> int:
        """Position of the first occurrence from ``start`` on, -1 if there is none."""
        before = b""
        for block in range(start // BLOCK_BYTES, len(self._ends)):
            names = before + self._unpack(block)
            base = block * BLOCK_BYTES - len(before)
            at = names.find(text, max(0, start - base))
            if at >= 0:
                return base + at
            before = names[-max(1, len(text) - 1) :]
        return -1

    def size_bytes(self) -> int:
        """Memory taken."""
        return sys.getsizeof(self._blocks) + sys.getsizeof(self._ends)

    def _unpack(self, block: int) -> bytes:
        start = self._ends[block - 1] if block else 0
        return zlib.decompress(self._blocks[start : self._ends[block]], _RAW, BLOCK_BYTES)


class NamesPacker:
    """Compresses names while they arrive, so that they never lie in memory as a whole."""

    def __init__(self) -> None:
        self._blocks = BytesIO()
        self._ends = array("I")
        self._rest = bytearray()
        self._size = 0

    def write(self, names: bytes) -> None:
        """Add names at the end."""
        self._rest += names
        self._size += len(names)
        while len(self._rest) >= BLOCK_BYTES:
            self._pack(bytes(self._rest[:BLOCK_BYTES]))
            del self._rest[:BLOCK_BYTES]

    def getvalue(self) -> PackedNames:
        """The names; call once."""
        if self._rest:
            self._pack(bytes(self._rest))
        return PackedNames(self._blocks.getvalue(), array("I", self._ends), self._size)

    def _pack(self, names: bytes) -> None:
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, _MEMORY)
        self._blocks.write(packer.compress(names) + packer.flush())
        self._ends.append(self._blocks.tell())
