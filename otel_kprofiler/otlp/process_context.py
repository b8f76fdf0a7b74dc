"""Encodes and decodes OpenTelemetry's process context: resource attributes as protobuf.

The format is the ``ProcessContext`` message of OTEP 4719, which uses types from
opentelemetry/proto/common/v1/common.proto and opentelemetry/proto/resource/v1/resource.proto.
Decoded data is untrusted: malformed messages are rejected, and unsupported values are ignored.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from otel_kprofiler.model import Attributes, AttributeScalar, AttributeValue
from otel_kprofiler.otlp.protobuf import key_value
from otel_kprofiler.otlp.wire import delimited, read_fields
from otel_kprofiler.otlp.writer import KeyValue

_RESOURCE: Final = 1
_EXTRA: Final = 2
_ARRAY: Final = 5


class ProcessContext(NamedTuple):
    """Resource attributes published by a process, and additional attributes in ``extra``."""

    resource: Attributes
    extra: Attributes


def encode_process_context(context: ProcessContext) -> bytes:
    """Encode a ``ProcessContext`` message."""
    resource = _attributes(b"\x0a", context.resource)
    return delimited(b"\x0a", resource) + _attributes(b"\x12", context.extra)


def _attributes(tag: bytes, attributes: Attributes) -> bytes:
    return b"".join(tag + key_value(KeyValue(*item)) for item in attributes.items())


def decode_process_context(payload: bytes) -> ProcessContext:
    """Decodes a ``ProcessContext`` message. Raises ``ValueError`` if the data is not protobuf.

    Unsupported values (bytes, maps, mixed lists) are ignored. A repeated key's last value wins.
    """
    resource: dict[str, AttributeValue] = {}
    extra: dict[str, AttributeValue] = {}
    for field, value in read_fields(payload):
        if field == _RESOURCE and isinstance(value, bytes):
            for inner, entry in read_fields(value):
                if inner == 1:
                    _add_attribute(resource, entry)
        elif field == _EXTRA:
            _add_attribute(extra, value)
    return ProcessContext(resource, extra)


def _add_attribute(attributes: dict[str, AttributeValue], entry: int | bytes) -> None:
    if not isinstance(entry, bytes):
        return
    key = value = b""
    for field, content in read_fields(entry):
        if isinstance(content, bytes):
            key, value = (content, value) if field == 1 else (key, content)
    converted = _any_value(value)
    if key and converted is not None:
        attributes[key.decode()] = converted


def _any_value(message: bytes) -> AttributeValue | None:
    value: AttributeValue | None = None
    for field, content in read_fields(message):
        if field == _ARRAY and isinstance(content, bytes):
            value = _items(content)
        else:
            value = _scalar(field, content)
    return value


def _scalar(field: int, content: int | bytes) -> AttributeScalar | None:
    if isinstance(content, int):
        if field == 2:
            return bool(content)
        return content - (content >> 63 << 64) if field == 3 else None
    if field == 1:
        return content.decode()
    if field == 4 and len(content) == 8:
        number: float = struct.unpack("<d", content)[0]
        return number
    return None


def _items(message: bytes) -> tuple[AttributeScalar, ...] | None:
    items = []
    for _, item in read_fields(message):
        if not isinstance(item, bytes):
            return None
        for field, content in read_fields(item):
            scalar = _scalar(field, content)
            if scalar is None:
                return None
            items.append(scalar)
    return tuple(items)
