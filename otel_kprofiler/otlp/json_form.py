"""The JSON form of OTLP profiles, written directly.

By the OTLP specification's JSON mapping: lowerCamelCase keys, 64-bit integers as strings,
32-bit ones as numbers, ids as hexadecimal text, other bytes as base64 (none occur here).
Fields that hold their default are not written. Entries start with a comma, which is taken
away where none must be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Final

from otel_kprofiler.model import AttributeValue, Form, SpanLink
from otel_kprofiler.otlp.wire import MASK_64
from otel_kprofiler.otlp.writer import Around, Header, KeyValue, Token, clean

_TABLES: Final = (
    b'"mappingTable":[{}', b'],"locationTable":[{}', b'],"functionTable":[{}',
    b'],"linkTable":[{}', b'],"stringTable":[""', b'],"attributeTable":[{}',
    b'],"stackTable":[{}',
)  # fmt: skip
_EMPTY_SAMPLE_BYTES: Final = len(b',{"timestampsUnixNano":[]}') - len(b",")
_REQUEST: Final = (b'{"resourceProfiles":[', b'],"dictionary":{', b"]}}")


def _quoted(text: str) -> bytes:
    return json.dumps(clean(text), ensure_ascii=False).encode()


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
    """Writes ``ExportProfilesServiceRequest`` as one line of JSON; thread-safe, has no state."""

    form = Form.JSON
    separator = b","

    def token(self, index: int) -> Token:
        """An index as a number."""
        return b"%d" % index

    def table_overhead(self) -> int:
        """The names of the tables and their zero entries."""
        return sum(map(len, _TABLES))

    def string(self, text: str) -> bytes:
        """Entry of ``stringTable``."""
        return b"," + _quoted(text)

    def mapping(self, limit: int, filename: Token, attributes: bytes) -> bytes:
        """Entry of ``mappingTable``."""
        return b"," + _object(
            _long(b"memoryLimit", limit),
            _field(b"filenameStrindex", filename),
            _array(b"attributeIndices", attributes),
        )

    def location(
        self, mapping: Token, address: int, lines: Sequence[tuple[Token, int]], attributes: bytes
    ) -> bytes:
        """Entry of ``locationTable``."""
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
            _array(b"attributeIndices", attributes),
        )

    def function(self, name: Token, system_name: Token, file: Token) -> bytes:
        """Entry of ``functionTable``."""
        return b"," + _object(
            _field(b"nameStrindex", name),
            _field(b"systemNameStrindex", system_name),
            _field(b"filenameStrindex", file),
        )

    def link(self, link: SpanLink) -> bytes:
        """Entry of ``linkTable``."""
        return b',{"traceId":"%b","spanId":"%b"}' % (
            link.trace_id.hex().encode(),
            link.span_id.hex().encode(),
        )

    def attribute(self, key: Token, value: AttributeValue) -> bytes:
        """Entry of ``attributeTable``."""
        return b"," + _object(_field(b"keyStrindex", key), b'"value":' + _any_value(value))

    def stack(self, locations: bytes) -> bytes:
        """Entry of ``stackTable``."""
        return b"," + _object(_array(b"locationIndices", locations))

    def sample_head(self, stack: Token, attributes: bytes, link: Token) -> bytes:
        """The fields of a sample before its timestamps."""
        fields = (
            _field(b"stackIndex", stack),
            _array(b"attributeIndices", attributes),
            _field(b"linkIndex", link),
        )
        return b"".join(field + b"," for field in fields if field)

    def timestamps(self, times_unix_ns: Sequence[int]) -> bytes:
        """Elements of ``timestampsUnixNano``, each with a comma: may be concatenated."""
        return b"".join([b',"%d"' % time for time in times_unix_ns])

    def sample(self, head: bytes, timestamps: bytes) -> bytes:
        """One sample of a profile."""
        return b',{%b"timestampsUnixNano":[%b]}' % (head, timestamps[1:])

    def sample_size(self, head: int, timestamps: int) -> int:
        """Length of ``sample`` from the lengths of its parts."""
        return head + timestamps + _EMPTY_SAMPLE_BYTES

    def key_value(self, attribute: KeyValue) -> bytes:
        """One element of ``attributes``."""
        key, value, key_token, value_token = attribute
        any_value = (
            b'{"stringValueStrindex":%b}' % value_token if value_token else _any_value(value)
        )
        return _object(
            _field(b"keyStrindex", key_token) or b'"key":' + _quoted(key), b'"value":' + any_value
        )

    def around(self, header: Header) -> Around:
        """Everything of a ResourceProfiles but its samples."""
        window, types = header.window, header.types
        period_type = _object(
            _field(b"typeStrindex", types.period_type), _field(b"unitStrindex", types.period_unit)
        )
        sample_type = _object(
            _field(b"typeStrindex", types.sample_type), _field(b"unitStrindex", types.sample_unit)
        )
        after = _object(
            _long(b"timeUnixNano", window.start_unix_ns),
            _long(b"durationNano", window.end_unix_ns - window.start_unix_ns),
            b'"periodType":' + period_type if types.period_type else b"",
            _long(b"period", window.period_ns) if types.period_type else b"",
            _text(b"profileId", header.profile_id.hex()),
            _array(b"attributeIndices", header.attributes),
        )
        scope_body = _object(
            _text(b"name", header.scope_name),
            _text(b"version", header.scope_version),
            _array(b"attributes", b",".join(header.scope_attributes)),
        )
        ends = (
            _text(b"schemaUrl", header.scope_schema_url),
            _text(b"schemaUrl", header.resource_schema_url),
        )
        scope_end, resource_end = (b"," + end if end else b"" for end in ends)
        return Around(
            (b'{"sampleType":%b,"samples":[' % sample_type, b"]," + after[1:]),
            (b'{"scope":%b,"profiles":[' % scope_body, b"]" + scope_end + b"}"),
            (
                b',{"resource":%b,"scopeProfiles":['
                % _object(_array(b"attributes", b",".join(header.resource_attributes))),
                b"]" + resource_end + b"}",
            ),
        )

    def group(self, around: Around, samples: Iterable[bytes]) -> bytes:
        """One ResourceProfiles."""
        text = b"".join(samples)[1:]
        for before, after in around:
            text = before + text + after
        return text

    def group_size(self, around: Around, samples: int) -> int:
        """Length of ``group`` from the length of its samples."""
        return samples - 1 + sum(len(before) + len(after) for before, after in around)

    def request(self, groups: Sequence[bytes], tables: Sequence[Sequence[bytes]]) -> bytes:
        """The whole request."""
        start, middle, end = _REQUEST
        dictionary = b"".join(
            zero + b"".join(table) for zero, table in zip(_TABLES, tables, strict=True)
        )
        return start + b"".join(groups)[1:] + middle + dictionary + end

    def request_size(self, groups: int, dictionary: int) -> int:
        """Length of ``request``."""
        return groups - 1 + dictionary + sum(map(len, _REQUEST))
