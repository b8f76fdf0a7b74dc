"""The binary form of OTLP profiles, written without protobuf's message classes.

Field numbers: opentelemetry/proto/profiles/v1development/profiles.proto and
opentelemetry/proto/common/v1/common.proto. Fields that hold their default are not written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from otel_kprofiler.model import AttributeValue, Form, SpanLink
from otel_kprofiler.otlp.wire import (
    MASK_64,
    delimited,
    delimited_size,
    double,
    fixed64,
    varint,
)
from otel_kprofiler.otlp.writer import Around, Header, KeyValue, ProfileTypes, Token, clean

_TABLE_TAGS: Final = (b"\x0a", b"\x12", b"\x1a", b"\x22", b"\x2a", b"\x32", b"\x3a")
_ZERO_ENTRIES: Final = tuple(tag + b"\0" for tag in _TABLE_TAGS)


def _field(tag: bytes, token: Token) -> bytes:
    return tag + token if token else b""


def _message(tag: bytes, body: bytes) -> bytes:
    return delimited(tag, body) if body else b""


def _text(tag: bytes, text: str) -> bytes:
    return _message(tag, clean(text).encode())


def _any_value(value: AttributeValue) -> bytes:
    """Body of an AnyValue; the presence of its one field tells the type, so zeros are written."""
    if isinstance(value, str):
        return delimited(b"\x0a", clean(value).encode())
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + varint(value & MASK_64)
    if isinstance(value, float):
        return b"\x21" + double(value)
    return delimited(b"\x2a", b"".join(delimited(b"\x0a", _any_value(item)) for item in value))


def key_value(attribute: KeyValue) -> bytes:
    """A ``KeyValue`` with its length, without a tag."""
    key, value, key_token, value_token = attribute
    any_value = b"\x40" + value_token if value_token else _any_value(value)
    body = _text(b"\x0a", "" if key_token else key) + delimited(b"\x12", any_value)
    return delimited(b"", body + _field(b"\x18", key_token))


def _repeated(tag: bytes, messages: Iterable[bytes]) -> bytes:
    return b"".join([tag + message for message in messages])


# What all profiles of a request have in common is written once.
@lru_cache(maxsize=4)
def _profile_ends(
    types: ProfileTypes, start_unix_ns: int, duration_ns: int, period_ns: int
) -> tuple[bytes, bytes]:
    sample_type = _field(b"\x08", types.sample_type) + _field(b"\x10", types.sample_unit)
    period_type = _field(b"\x08", types.period_type) + _field(b"\x10", types.period_unit)
    after = b"\x19" + fixed64(start_unix_ns) + b"\x20" + varint(duration_ns)
    if period_type:
        after += delimited(b"\x2a", period_type) + b"\x30" + varint(period_ns)
    return delimited(b"\x0a", sample_type), after


@lru_cache(maxsize=4)
def _scope_ends(
    name: str, version: str, attributes: tuple[bytes, ...], schema_url: str
) -> tuple[bytes, bytes]:
    body = _text(b"\x0a", name) + _text(b"\x12", version) + _repeated(b"\x1a", attributes)
    return delimited(b"\x0a", body), _text(b"\x1a", schema_url)


class ProtobufWriter:
    """Writes ``ExportProfilesServiceRequest`` messages; thread-safe, as it has no state."""

    form = Form.PROTOBUF
    separator = b""

    token = staticmethod(varint)
    key_value = staticmethod(key_value)

    def table_overhead(self) -> int:
        """Seven zero entries of two bytes."""
        return sum(map(len, _ZERO_ENTRIES))

    def string(self, text: str) -> bytes:
        """Entry of ``string_table``; the text is clean already."""
        return delimited(b"\x2a", text.encode())

    def mapping(self, limit: int, filename: Token, attributes: bytes) -> bytes:
        """Entry of ``mapping_table``; ``memory_start`` and ``file_offset`` are 0."""
        body = _field(b"\x10", varint(limit) if limit else b"") + _field(b"\x20", filename)
        return delimited(b"\x0a", body + _message(b"\x2a", attributes))

    def location(
        self, mapping: Token, address: int, lines: Sequence[tuple[Token, int]], attributes: bytes
    ) -> bytes:
        """Entry of ``location_table``."""
        body = b"\x08" + mapping if mapping else b""
        if address:
            body += b"\x10" + varint(address & MASK_64)
        for function, line in lines:
            inner = b"\x08" + function
            if line:
                inner += b"\x10" + varint(line)
            body += b"\x1a" + varint(len(inner)) + inner
        if attributes:
            body += b"\x22" + varint(len(attributes)) + attributes
        return b"\x12" + varint(len(body)) + body

    def function(self, name: Token, system_name: Token, file: Token) -> bytes:
        """Entry of ``function_table``."""
        body = _field(b"\x08", name) + _field(b"\x10", system_name) + _field(b"\x18", file)
        return delimited(b"\x1a", body)

    def link(self, link: SpanLink) -> bytes:
        """Entry of ``link_table``."""
        return delimited(
            b"\x22", _message(b"\x0a", link.trace_id) + _message(b"\x12", link.span_id)
        )

    def attribute(self, key: Token, value: AttributeValue) -> bytes:
        """Entry of ``attribute_table``, without a unit."""
        return delimited(b"\x32", _field(b"\x08", key) + delimited(b"\x12", _any_value(value)))

    def stack(self, locations: bytes) -> bytes:
        """Entry of ``stack_table``."""
        return delimited(b"\x3a", _message(b"\x0a", locations))

    def sample_head(self, stack: Token, attributes: bytes, link: Token) -> bytes:
        """The fields of a sample before its timestamps."""
        head = b"\x08" + stack if stack else b""
        if attributes:
            head += b"\x12" + varint(len(attributes)) + attributes
        return head + b"\x18" + link if link else head

    def timestamps(self, times_unix_ns: Sequence[int]) -> bytes:
        """Content of ``timestamps_unix_nano``: may be concatenated."""
        return struct.pack(f"<{len(times_unix_ns)}Q", *times_unix_ns)

    def sample(self, head: bytes, timestamps: bytes) -> bytes:
        """One sample of a profile."""
        times = delimited(b"\x2a", timestamps)
        return b"\x12" + varint(len(head) + len(times)) + head + times

    def sample_size(self, head: int, timestamps: int) -> int:
        """Length of ``sample`` from the lengths of its parts."""
        return delimited_size(head + delimited_size(timestamps))

    def around(self, header: Header) -> Around:
        """Everything of a ResourceProfiles but its samples."""
        window = header.window
        start, end = window.start_unix_ns, window.end_unix_ns
        before, after = _profile_ends(header.types, start, end - start, window.period_ns)
        after += _message(b"\x3a", header.profile_id) + _message(b"\x5a", header.attributes)
        return Around(
            (before, after),
            _scope_ends(
                header.scope_name,
                header.scope_version,
                header.scope_attributes,
                header.scope_schema_url,
            ),
            (
                delimited(b"\x0a", _repeated(b"\x0a", header.resource_attributes)),
                _text(b"\x1a", header.resource_schema_url),
            ),
        )

    def group(self, around: Around, samples: Iterable[bytes]) -> bytes:
        """One ResourceProfiles."""
        profile = around.profile[0] + b"".join(samples) + around.profile[1]
        inner = delimited(b"\x12", profile).join(around.scope_profiles)
        return delimited(b"\x0a", delimited(b"\x12", inner).join(around.resource_profiles))

    def group_size(self, around: Around, samples: int) -> int:
        """Length of ``group`` from the length of its samples."""
        size = samples
        for before, after in around:
            size = delimited_size(len(before) + size + len(after))
        return size

    def request(self, groups: Sequence[bytes], tables: Sequence[Sequence[bytes]]) -> bytes:
        """The whole request; ``tables`` are without their zero entries."""
        body = b"".join(
            zero + b"".join(table) for zero, table in zip(_ZERO_ENTRIES, tables, strict=True)
        )
        return b"".join(groups) + delimited(b"\x12", body)

    def request_size(self, groups: int, dictionary: int) -> int:
        """Length of ``request``; ``dictionary`` counts the zero entries too."""
        return groups + delimited_size(dictionary)
