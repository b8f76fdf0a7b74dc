"""Limits the number of messages per request.

An empty message grows from 2 to 80 bytes when decoded.
"""

from functools import cache
from typing import Any, Final

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.otlp.messages import ExportProfilesServiceRequest
from otel_kprofiler.otlp.wire import FIXED_BYTES, LENGTH_DELIMITED, read_varint

_LEAST_BYTES: Final = 12
"""Minimum average size of messages in bytes. Messages encoded by this package average 19 bytes."""
_ANY: Final = 10_000
"""Number of messages that are allowed regardless of their average size."""
_GROUPS: Final = (3, 4)
"""Wire types of group start and group end, which have no value."""


def refuse_many_messages(data: bytes) -> None:
    """Reject a request with too many small messages, which take far more memory once decoded.

    ``data`` is protobuf (https://protobuf.dev/programming-guides/encoding) or JSON. Counting stops
    at malformed data, which the decoder reports. Raises ``PayloadError``.
    """
    limit = _ANY + len(data) // _LEAST_BYTES
    if data[:1] == b"{":
        count = data.count(b"{")
    else:
        count = _count(data, _children(ExportProfilesServiceRequest.DESCRIPTOR), limit)
    if count > limit:
        raise PayloadError(f"the {len(data):,}-byte request contains more than {limit:,} messages")


@cache
def _children(descriptor: Any) -> dict[int, Any]:
    """Returns the descriptors for a message type's submessages, by field number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type}


def _count(data: bytes, children: dict[int, Any], limit: int) -> int:
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
    except ValueError:  # truncated
        pass
    return count
