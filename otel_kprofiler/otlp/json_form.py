"""Encodes OTLP profiles as JSON without using protobuf message classes.

Follows the OTLP specification's JSON mapping: lowerCamelCase keys, 64-bit integers as strings,
32-bit integers as numbers, ids as hexadecimal text. Default values are omitted. Each entry starts
with a comma, which is stripped from the first entry.
"""

import json
import math
from collections.abc import Sequence
from typing import Final

from otel_kprofiler.model import AttributeValue, Form, SpanLink, Window
from otel_kprofiler.otlp.wire import MASK_64
from otel_kprofiler.otlp.writer import Envelope, KeyValue, ProfileTypes, Token
from otel_kprofiler.text import escape_surrogates

_TABLES: Final = (
    b'"mappingTable":[{}', b'],"locationTable":[{}', b'],"functionTable":[{}',
    b'],"linkTable":[{}', b'],"stringTable":[""', b'],"attributeTable":[{}',
    b'],"stackTable":[{}',
)  # fmt: skip
_REQUEST: Final = (b'{"resourceProfiles":[', b'],"dictionary":{', b"]}}")


def _quoted(text: str) -> bytes:
    return json.dumps(escape_surrogates(text), ensure_ascii=False).encode()


def _object(*fields: bytes) -> bytes:
    return b"{" + b",".join(field for field in fields if field) + b"}"


def _field(name: bytes, token: Token) -> bytes:
    return b'"%b":%b' % (name, token) if token else b""


def _long(name: bytes, value: int) -> bytes:
    return b'"%b":"%d"' % (name, value) if value else b""


def _array(name: bytes, tokens: bytes) -> bytes:
    return b'"%b":[%b]' % (name, tokens) if tokens else b""


def _text(name: bytes, text: str) -> bytes:
    return b'"%b":%b' % (name, _quoted(text)) if text else b""


def _last_text(schema_url: str) -> bytes:
    """Returns the closing brace of an object, preceded by ``schemaUrl`` unless it is empty."""
    return b"," + _text(b"schemaUrl", schema_url) + b"}" if schema_url else b"}"


def _double(value: float) -> bytes:
    if math.isfinite(value):
        return json.dumps(value).encode()
    return b'"NaN"' if math.isnan(value) else b'"Infinity"' if value > 0 else b'"-Infinity"'


def _any_value(value: AttributeValue) -> bytes:
    if isinstance(value, str):
        return b'{"stringValue":%b}' % _quoted(value)
    if isinstance(value, bool):
        return b'{"boolValue":true}' if value else b'{"boolValue":false}'
    if isinstance(value, int):
        return b'{"intValue":"%d"}' % value
    if isinstance(value, float):
        return b'{"doubleValue":%b}' % _double(value)
    return b'{"arrayValue":{"values":[%b]}}' % b",".join(map(_any_value, value))


class JsonWriter:
    """Writes an ``ExportProfilesServiceRequest`` as one line of JSON; stateless and thread-safe."""

    form = Form.JSON
    separator = b","
    first_tokens: tuple[Token, ...] = ()
    sample_bytes = len(b',{"timestampsUnixNano":[]}') - len(b",")

    def token(self, index: int) -> Token:
        """Returns an index as a JSON number."""
        return b"%d" % index

    def string(self, text: str) -> bytes:
        """Returns an entry for ``stringTable``."""
        return b"," + _quoted(text)

    def mapping(self, place: tuple[int, int, int], filename: Token, attributes: bytes) -> bytes:
        """Returns an entry for ``mappingTable``; see :class:`Writer`."""
        start, limit, offset = place
        return b"," + _object(
            _long(b"memoryStart", start),
            _long(b"memoryLimit", limit),
            _long(b"fileOffset", offset),
            _field(b"filenameStrindex", filename),
            _array(b"attributeIndices", attributes),
        )

    def location(
        self, mapping: Token, address: int, lines: Sequence[tuple[Token, int]], attributes: bytes
    ) -> bytes:
        """Returns an entry for ``locationTable``."""
        return b"," + _object(
            _field(b"mappingIndex", mapping),
            _long(b"address", address & MASK_64),
            _array(
                b"lines",
                b",".join(
                    _object(_field(b"functionIndex", function), _long(b"line", line))
                    for function, line in lines
                ),
            ),
            attributes,
        )

    def raw_location(self, address: int, attributes: bytes) -> bytes:
        """Returns an entry for ``locationTable`` without a mapping or lines."""
        return self.location(b"", address, (), attributes)

    def location_attributes(self, attributes: bytes) -> bytes:
        """Returns the ``attributeIndices`` field of a location."""
        return _array(b"attributeIndices", attributes)

    def function(self, name: Token, system_name: Token, file: Token, start_line: int) -> bytes:
        """Returns an entry for ``functionTable``."""
        return b"," + _object(
            _field(b"nameStrindex", name),
            _field(b"systemNameStrindex", system_name),
            _field(b"filenameStrindex", file),
            _long(b"startLine", start_line),
        )

    def link(self, link: SpanLink) -> bytes:
        """Returns an entry for ``linkTable``."""
        return b',{"traceId":"%b","spanId":"%b"}' % (
            link.trace_id.hex().encode(),
            link.span_id.hex().encode(),
        )

    def attribute(self, key: Token, value: AttributeValue) -> bytes:
        """Returns an entry for ``attributeTable``."""
        return b"," + _object(_field(b"keyStrindex", key), b'"value":' + _any_value(value))

    def stack(self, locations: bytes) -> bytes:
        """Returns an entry for ``stackTable``."""
        return b"," + _object(_array(b"locationIndices", locations))

    def sample_attributes(self, attributes: bytes) -> bytes:
        """Returns the ``attributeIndices`` field of a sample."""
        return _array(b"attributeIndices", attributes)

    def sample_head(self, stack: Token, attributes: bytes, link: Token) -> bytes:
        """Returns the fields that precede a sample's timestamps."""
        fields = (_field(b"stackIndex", stack), attributes, _field(b"linkIndex", link))
        return b"".join(field + b"," for field in fields if field)

    def timestamps(self, times_unix_ns: Sequence[int]) -> bytes:
        """Returns elements of ``timestampsUnixNano``, each preceded by a comma."""
        return b"".join([b',"%d"' % time for time in times_unix_ns])

    def values(self, values: Sequence[int]) -> bytes:
        """Returns elements of ``values``, each preceded by a comma."""
        return self.timestamps(values)

    def sample(self, head: bytes, timestamps: bytes, values: bytes) -> bytes:
        """Returns one sample of a profile."""
        if values:
            head += b'"values":[%b],' % values[1:]
        if timestamps:
            head += b'"timestampsUnixNano":[%b],' % timestamps[1:]
        return b",{%b}" % head[:-1]

    def key_value(self, attribute: KeyValue) -> bytes:
        """Returns one element of ``attributes``."""
        key, value, key_token, value_token = attribute
        any_value = (
            b'{"stringValueStrindex":%b}' % value_token if value_token else _any_value(value)
        )
        return _object(
            _field(b"keyStrindex", key_token) or b'"key":' + _quoted(key), b'"value":' + any_value
        )

    def profile_envelope(self, window: Window, types: ProfileTypes, period: int) -> Envelope:
        """Returns a profile's JSON text before and after the elements of ``samples``."""
        period_type = _object(
            _field(b"typeStrindex", types.period_type), _field(b"unitStrindex", types.period_unit)
        )
        sample_type = _object(
            _field(b"typeStrindex", types.sample_type), _field(b"unitStrindex", types.sample_unit)
        )
        fields = (
            _long(b"timeUnixNano", window.start_unix_ns),
            _long(b"durationNano", window.end_unix_ns - window.start_unix_ns),
            b'"periodType":' + period_type if types.period_type else b"",
            _long(b"period", period) if types.period_type else b"",
        )
        return (
            b',{"sampleType":%b,"samples":[' % sample_type,
            b"".join([b"]", *(b"," + field for field in fields if field)]),
        )

    def profile(
        self, envelope: Envelope, samples: bytes, profile_id: bytes, attributes: bytes
    ) -> bytes:
        """Returns one element of ``profiles``."""
        fields = (_text(b"profileId", profile_id.hex()), _array(b"attributeIndices", attributes))
        profile = samples[1:].join(envelope)
        return b"".join([profile, *(b"," + field for field in fields if field), b"}"])

    def scope(
        self, name: str, version: str, attributes: Sequence[bytes], schema_url: str
    ) -> Envelope:
        """Returns the text before and after the ``profiles`` in a ``scopeProfiles`` element."""
        scope = _object(
            _text(b"name", name),
            _text(b"version", version),
            _array(b"attributes", b",".join(attributes)),
        )
        return b'{"scope":%b,"profiles":[' % scope, b"]" + _last_text(schema_url)

    def resource(self, attributes: Sequence[bytes], schema_url: str) -> Envelope:
        """Returns the text before and after ``scopeProfiles`` in a ``resourceProfiles`` element."""
        body = _object(_array(b"attributes", b",".join(attributes)))
        return b',{"resource":%b,"scopeProfiles":[' % body, b"]" + _last_text(schema_url)

    def group(self, resource: Envelope, scope: Envelope, profiles: bytes) -> bytes:
        """Returns one element of ``resourceProfiles``."""
        return profiles[1:].join(scope).join(resource)

    def request(self, groups: Sequence[bytes], tables: Sequence[Sequence[bytes]]) -> bytes:
        """Returns the whole request."""
        start, middle, end = _REQUEST
        dictionary = b"".join(
            zero + b"".join(table) for zero, table in zip(_TABLES, tables, strict=True)
        )
        return start + b"".join(groups)[1:] + middle + dictionary + end
