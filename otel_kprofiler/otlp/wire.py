"""Encodes and decodes protobuf's wire format: https://protobuf.dev/programming-guides/encoding."""

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

MASK_64: Final = (1 << 64) - 1
LENGTH_DELIMITED: Final = 2
FIXED_BYTES: Final = {1: 8, 5: 4}  # by wire type
_MAX_SHIFT: Final = 63

ONE_BYTE: Final = tuple(bytes((value,)) for value in range(128))


def varint(value: int) -> bytes:
    """Encode an unsigned integer below 2**64 as a varint of 1 to 10 bytes."""
    if value < 128:
        return ONE_BYTE[value]
    if value < 16384:
        return bytes((value & 127 | 128, value >> 7))
    return bytes((value & 127 | 128, value >> 7 & 127 | 128)) + _high_varint(value >> 14)


_high_varint: Final = lru_cache(maxsize=1024)(varint)
"""Cached :func:`varint` for the high bits, which most addresses in a mapping share."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a varint's value, truncated to 64 bits, and the position of the next byte.

    Raises ``ValueError`` if the varint is truncated, or longer than 10 bytes.
    """
    try:
        byte = data[at]
        at += 1
        if byte < 128:
            return byte, at
        value, shift = byte & 127, 7
        while (byte := data[at]) >= 128:
            value |= (byte & 127) << shift
            at += 1
            shift += 7
            if shift > _MAX_SHIFT:
                raise ValueError("a varint is longer than 10 bytes")
        return (value | byte << shift) & MASK_64, at + 1
    except IndexError:
        pass
    raise ValueError("a varint is truncated")


def read_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and value of each field: a varint as ``int``, all other types as bytes.

    Raises ``ValueError`` if the message is truncated, or contains a group or an unknown wire type.
    """
    at, end = 0, len(message)
    while at < end:
        tag, at = read_varint(message, at)
        wire_type = tag & 7
        if wire_type == 0:
            value, at = read_varint(message, at)
            yield tag >> 3, value
            continue
        if wire_type == LENGTH_DELIMITED:
            length, at = read_varint(message, at)
        else:
            length = FIXED_BYTES.get(wire_type, -1)
        if length < 0 or length > end - at:
            raise ValueError("a field is truncated or has an unknown wire type")
        yield tag >> 3, message[at : at + length]
        at += length


def delimited(tag: bytes, body: bytes) -> bytes:
    """Encode a length-delimited field (string, bytes, message, packed array), even if empty."""
    size = len(body)
    return tag + (ONE_BYTE[size] if size < 128 else varint(size)) + body


def fixed64(value: int) -> bytes:
    """Encode a ``fixed64`` without its tag."""
    return struct.pack("<Q", value)


def double(value: float) -> bytes:
    """Encode a ``double`` without its tag."""
    return struct.pack("<d", value)
