"""Protobuf wire format, the writing side: varints, tags, length-delimited fields.

Source: https://protobuf.dev/programming-guides/encoding/. All functions are pure.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

MASK_64: Final = (1 << 64) - 1

_ONE_BYTE: Final = tuple(bytes((value,)) for value in range(128))


def varint(value: int) -> bytes:
    """An unsigned integer below 2**64 as a varint of 1 … 10 bytes."""
    if value < 128:
        return _ONE_BYTE[value]
    if value < 16384:
        return bytes((value & 127 | 128, value >> 7))
    if value < 2097152:
        return bytes((value & 127 | 128, value >> 7 & 127 | 128, value >> 14))
    low = bytes((value & 127 | 128, value >> 7 & 127 | 128, value >> 14 & 127 | 128))
    return low + _high_varint(value >> 21)


_high_varint: Final = lru_cache(maxsize=256)(varint)
"""Addresses of one object have their high bits in common."""


def varint_size(value: int) -> int:
    """Length of ``varint(value)`` in bytes."""
    return 1 if value < 128 else (value.bit_length() + 6) // 7


def delimited(tag: bytes, body: bytes) -> bytes:
    """A length-delimited field (string, bytes, message, packed array); also when it is empty."""
    return tag + varint(len(body)) + body


def delimited_size(length: int) -> int:
    """Size in bytes of a length-delimited field with a one-byte tag and this many bytes in it."""
    return 1 + varint_size(length) + length


def fixed64(value: int) -> bytes:
    """A ``fixed64`` without its tag."""
    return struct.pack("<Q", value)


def double(value: float) -> bytes:
    """A ``double`` without its tag."""
    return struct.pack("<d", value)
