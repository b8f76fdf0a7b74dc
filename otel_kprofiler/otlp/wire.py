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
    return bytes((value & 127 | 128, value >> 7 & 127 | 128)) + _high_varint(value >> 14)


_high_varint: Final = lru_cache(maxsize=1024)(varint)
"""Addresses of one object have their high bits in common."""


def delimited(tag: bytes, body: bytes) -> bytes:
    """A length-delimited field (string, bytes, message, packed array); also when it is empty."""
    size = len(body)
    return tag + (_ONE_BYTE[size] if size < 128 else varint(size)) + body


def fixed64(value: int) -> bytes:
    """A ``fixed64`` without its tag."""
    return struct.pack("<Q", value)


def double(value: float) -> bytes:
    """A ``double`` without its tag."""
    return struct.pack("<d", value)
