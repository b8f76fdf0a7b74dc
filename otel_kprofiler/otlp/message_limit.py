"""Counts the messages of a request before it is decoded: an empty one grows from 2 bytes to 80."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.otlp.messages import ExportProfilesServiceRequest
from otel_kprofiler.otlp.wire import FIXED_BYTES, LENGTH_DELIMITED, read_varint

_LEAST_BYTES: Final = 12
"""Least size of a message, on average; those of our requests have 19 bytes."""
_ANY: Final = 10_000
"""So many may be smaller."""
_GROUPS: Final = (3, 4)
"""Wire types that begin and end a group, which the decoder skips: no values of their own."""


def refuse_many_messages(data: bytes) -> None:
    """Refuse a request whose messages are so small that decoding takes many times its size.

    Wire format: https://protobuf.dev/programming-guides/encoding. Damage ends the count, and is
    reported by the decoder.

    Args:
        data: a request, as protobuf or as JSON.

    Raises:
        PayloadError: there are too many.
    """
    limit = _ANY + len(data) // _LEAST_BYTES
    if data[:1] == b"{":
        count = data.count(b"{")
    else:
        count = _count(data, _children(ExportProfilesServiceRequest.DESCRIPTOR), limit)
    if count > limit:
        raise PayloadError(f"the request of {len(data):,} bytes has more than {limit:,} messages")


@cache
def _children(descriptor: Any) -> dict[int, Any]:
    """Descriptors of the fields of a message that are messages, by number."""
    return {one.number: one.message_type for one in descriptor.fields if one.message_type}


def _count(data: bytes, children: dict[int, Any], limit: int) -> int:
    """Number of messages, at most one more than the limit."""
    count, parts = 0, [(0, len(data), children)]
    try:
        while parts:
            at, end, children = parts.pop()
            while at < end:
                tag, at = read_varint(data, at)
                kind = tag & 7
                if kind == LENGTH_DELIMITED:
                    size, at = read_varint(data, at)
                    child = children.get(tag >> 3)
                    if child is not None:
                        count += 1
                        if count > limit:
                            return count
                        if size and (inner := _children(child)):
                            parts.append((at, min(at + size, end), inner))
                    at += size
                elif kind in FIXED_BYTES:
                    at += FIXED_BYTES[kind]
                elif kind == 0:
                    _, at = read_varint(data, at)
                elif kind not in _GROUPS:
                    break
    except ValueError:  # cut off
        pass
    return count
