"""Encodes OTLP profiles as protobuf without using protobuf message classes.

The field numbers are defined in opentelemetry/proto/profiles/v1development/profiles.proto and
opentelemetry/proto/common/v1/common.proto. Default values are omitted.
"""

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from otel_kprofiler.model import AttributeValue, Form, SpanLink, Window
from otel_kprofiler.otlp.wire import MASK_64, ONE_BYTE, delimited, double, fixed64, varint
from otel_kprofiler.otlp.writer import Envelope, KeyValue, ProfileTypes, Token
from otel_kprofiler.text import escape_surrogates

_TABLE_TAGS: Final = (b"\x0a", b"\x12", b"\x1a", b"\x22", b"\x2a", b"\x32", b"\x3a")
_SHORT_TEXT: Final = 200
"""Maximum length, in characters, of strings whose encoding is cached."""
_MAX_SHORT_VALUE: Final = 100
"""Maximum size of an attribute value, in bytes, for which the attribute's length fits in one byte.
"""
_ZERO_ENTRIES: Final = tuple(tag + b"\0" for tag in _TABLE_TAGS)


def _field(tag: bytes, token: Token) -> bytes:
    return tag + token if token else b""


def message_field(tag: bytes, body: bytes) -> bytes:
    """Returns an encoded length-delimited field; empty if its body is empty."""
    return delimited(tag, body) if body else b""


def text_field(tag: bytes, text: str) -> bytes:
    """Returns an encoded string field with lone surrogates escaped; empty for an empty string."""
    return message_field(tag, escape_surrogates(text).encode())


def _any_value(value: AttributeValue) -> bytes:
    """Encode the body of an AnyValue. Zeros are encoded, to preserve the type."""
    if isinstance(value, str):
        return delimited(b"\x0a", escape_surrogates(value).encode())
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + varint(value & MASK_64)
    if isinstance(value, float):
        return b"\x21" + double(value)
    return delimited(b"\x2a", b"".join(delimited(b"\x0a", _any_value(item)) for item in value))


def key_value(attribute: KeyValue) -> bytes:
    """Encode a ``KeyValue``, preceded by its length, but not by a tag."""
    key, value, key_token, value_token = attribute
    any_value = b"\x40" + value_token if value_token else _any_value(value)
    body = text_field(b"\x0a", "" if key_token else key) + delimited(b"\x12", any_value)
    return delimited(b"", body + _field(b"\x18", key_token))


@lru_cache(2048)
def _string(text: str) -> bytes:
    """Encode an entry in ``string_table``. Results are cached, because most strings recur."""
    return delimited(b"\x2a", text.encode())


def _repeated(tag: bytes, messages: Iterable[bytes]) -> bytes:
    return b"".join([tag + message for message in messages])


class ProtobufWriter:
    """Writes ``ExportProfilesServiceRequest`` messages; stateless and thread-safe."""

    form = Form.PROTOBUF
    separator = b""
    first_tokens = tuple(map(varint, range(2048)))
    sample_bytes = 4

    token = staticmethod(varint)
    key_value = staticmethod(key_value)

    def string(self, text: str) -> bytes:
        """Returns an entry for ``string_table``. The string must not contain surrogates."""
        return _string(text) if len(text) <= _SHORT_TEXT else delimited(b"\x2a", text.encode())

    def mapping(self, place: tuple[int, int, int], filename: Token, attributes: bytes) -> bytes:
        """Returns an entry for ``mapping_table``; see :class:`Writer`."""
        body = b""
        for tag, number in zip((b"\x08", b"\x10", b"\x18"), place, strict=True):
            body += _field(tag, varint(number & MASK_64) if number else b"")
        body += _field(b"\x20", filename)
        return delimited(b"\x0a", body + message_field(b"\x2a", attributes))

    def location(
        self, mapping: Token, address: int, lines: Sequence[tuple[Token, int]], attributes: bytes
    ) -> bytes:
        """Returns an entry for ``location_table``."""
        body = b"\x08" + mapping if mapping else b""
        if address:
            body += b"\x10" + varint(address & MASK_64)
        for function, line in lines:
            inner = b"\x08" + function + b"\x10" + varint(line) if line else b"\x08" + function
            body += b"\x1a" + ONE_BYTE[len(inner)] + inner  # two varints fit in 127 bytes
        body += attributes
        size = len(body)
        return b"\x12" + ONE_BYTE[size] + body if size < len(ONE_BYTE) else delimited(b"\x12", body)

    def raw_location(self, address: int, attributes: bytes) -> bytes:
        """Returns a ``location_table`` entry without a mapping or lines."""
        body = b"\x10" + varint(address & MASK_64) if address else b""
        return delimited(b"\x12", body + attributes)

    def location_attributes(self, attributes: bytes) -> bytes:
        """Returns the ``attribute_indices`` field of a location."""
        return message_field(b"\x22", attributes)

    def function(self, name: Token, system_name: Token, file: Token, start_line: int) -> bytes:
        """Returns an entry for ``function_table``."""
        body = b"\x08" + name if name else b""
        if system_name:
            body += b"\x10" + system_name
        if file:
            body += b"\x18" + file
        if start_line:
            body += b"\x20" + varint(start_line)
        return b"\x1a" + ONE_BYTE[len(body)] + body  # four varints fit in 127 bytes

    def link(self, link: SpanLink) -> bytes:
        """Returns an entry for ``link_table``."""
        return delimited(
            b"\x22", message_field(b"\x0a", link.trace_id) + message_field(b"\x12", link.span_id)
        )

    def attribute(self, key: Token, value: AttributeValue) -> bytes:
        """Returns an entry for ``attribute_table``, without a unit."""
        body = _any_value(value)
        size = len(body)
        if size > _MAX_SHORT_VALUE:
            return delimited(b"\x32", _field(b"\x08", key) + delimited(b"\x12", body))
        body = b"\x12" + ONE_BYTE[size] + body
        if key:
            body = b"\x08" + key + body
        return b"\x32" + ONE_BYTE[len(body)] + body

    def stack(self, locations: bytes) -> bytes:
        """Returns a ``stack_table`` entry."""
        return delimited(b"\x3a", delimited(b"\x0a", locations))

    def sample_attributes(self, attributes: bytes) -> bytes:
        """Returns the ``attribute_indices`` field of a sample."""
        return message_field(b"\x12", attributes)

    def sample_head(self, stack: Token, attributes: bytes, link: Token) -> bytes:
        """Returns the fields of a sample that precede its timestamps."""
        head = b"\x08" + stack + attributes if stack else attributes
        return head + b"\x18" + link if link else head

    def timestamps(self, times_unix_ns: Sequence[int]) -> bytes:
        """Returns the content of ``timestamps_unix_nano``."""
        if len(times_unix_ns) == 1:
            return times_unix_ns[0].to_bytes(8, "little")
        return struct.pack(f"<{len(times_unix_ns)}Q", *times_unix_ns)

    def values(self, values: Sequence[int]) -> bytes:
        """Returns the encoded content of the ``values`` field."""
        return b"".join([varint(value & MASK_64) for value in values])

    def sample(self, head: bytes, timestamps: bytes, values: bytes) -> bytes:
        """Returns one sample from a profile."""
        if values:
            head += delimited(b"\x22", values)
        return delimited(b"\x12", head + message_field(b"\x2a", timestamps))

    def profile_envelope(self, window: Window, types: ProfileTypes, period: int) -> Envelope:
        """Returns a profile's encoded fields before and after ``samples``."""
        sample_type = _field(b"\x08", types.sample_type) + _field(b"\x10", types.sample_unit)
        period_type = _field(b"\x08", types.period_type) + _field(b"\x10", types.period_unit)
        after = b"\x19" + fixed64(window.start_unix_ns)
        after += b"\x20" + varint(window.end_unix_ns - window.start_unix_ns)
        if period_type:
            after += delimited(b"\x2a", period_type) + b"\x30" + varint(period)
        return delimited(b"\x0a", sample_type), after

    def profile(
        self, envelope: Envelope, samples: bytes, profile_id: bytes, attributes: bytes
    ) -> bytes:
        """Returns one ``profiles`` field for a ScopeProfiles."""
        fields = message_field(b"\x3a", profile_id) + message_field(b"\x5a", attributes)
        return delimited(b"\x12", samples.join(envelope) + fields)

    def scope(
        self, name: str, version: str, attributes: Sequence[bytes], schema_url: str
    ) -> Envelope:
        """Returns the ``scope`` and ``schema_url`` fields of a ScopeProfiles."""
        scope = (
            text_field(b"\x0a", name)
            + text_field(b"\x12", version)
            + _repeated(b"\x1a", attributes)
        )
        return delimited(b"\x0a", scope), text_field(b"\x1a", schema_url)

    def resource(self, attributes: Sequence[bytes], schema_url: str) -> Envelope:
        """Returns the ``resource`` and ``schema_url`` fields for a ResourceProfiles."""
        return delimited(b"\x0a", _repeated(b"\x0a", attributes)), text_field(b"\x1a", schema_url)

    def group(self, resource: Envelope, scope: Envelope, profiles: bytes) -> bytes:
        """Returns one ``resource_profiles`` field of a request."""
        return delimited(b"\x0a", delimited(b"\x12", profiles.join(scope)).join(resource))

    def request(self, groups: Sequence[bytes], tables: Sequence[Sequence[bytes]]) -> bytes:
        """Returns the whole request. Adds entry 0, which ``tables`` must not contain."""
        body = b"".join(
            zero + b"".join(table) for zero, table in zip(_ZERO_ENTRIES, tables, strict=True)
        )
        return b"".join(groups) + delimited(b"\x12", body)
