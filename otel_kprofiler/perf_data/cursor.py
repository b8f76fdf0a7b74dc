"""Reads fields from binary data, checking that each field lies within the data."""

import struct
from typing import Final

from otel_kprofiler.errors import PayloadError

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


class Cursor:
    """A position in a range of binary data, which is not copied.

    ``end`` is exclusive. Raises ``PayloadError`` if the range is not within the data.
    """

    __slots__ = ("data", "end", "position")

    def __init__(self, data: bytes, start: int, end: int) -> None:
        if not 0 <= start <= end <= len(data):
            raise PayloadError(f"a section extends to byte {end:,}, beyond the end of the file")
        self.data = data
        self.position = start
        self.end = end

    @property
    def left(self) -> int:
        """Returns the number of remaining bytes."""
        return self.end - self.position

    def skip(self, count: int) -> int:
        """Skips bytes, and returns the position of the first skipped byte.

        Raises ``PayloadError`` if fewer bytes are left.
        """
        position = self.position
        if not 0 <= count <= self.end - position:
            raise PayloadError(f"a field at byte {position:,} exceeds its record")
        self.position = position + count
        return position

    def u32(self) -> int:
        """Reads a 32-bit number."""
        (number,) = _U32.unpack_from(self.data, self.skip(4))
        return int(number)

    def u64(self) -> int:
        """Reads a 64-bit number."""
        (number,) = _U64.unpack_from(self.data, self.skip(8))
        return int(number)

    def take(self, count: int) -> bytes:
        """Reads the given number of bytes."""
        position = self.skip(count)
        return self.data[position : position + count]

    def name(self) -> bytes:
        """Reads a string up to its NUL, or up to the end of the range."""
        return self.take(self.left).partition(b"\0")[0]

    def string(self) -> bytes:
        """Reads a ``perf_header_string``: a length, and a string padded with NULs."""
        return self.take(self.u32()).partition(b"\0")[0]
