"""Writes the messages of an OTLP request; their fields are listed here alone.

Field numbers: opentelemetry/proto/profiles/v1development/profiles.proto and
opentelemetry/proto/common/v1/common.proto. Fields with their default value are not written. Entries
and samples are self-contained, so the size of a request is their sum plus a few length prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from otel_kprofiler.model import AttributeValue, SpanLink, Window
from otel_kprofiler.otlp.syntax import Syntax, Token, WireType
from otel_kprofiler.otlp.wire import MASK_64

MAPPING, LOCATION, FUNCTION, LINK, STRING, ATTRIBUTE, STACK = range(7)
"""Tables of the dictionary in the order of their field numbers."""


class KeyValue(NamedTuple):
    """An attribute of a resource or scope.

    ``key_token`` and ``value_token`` refer to strings of the dictionary; if they are empty, the
    text is written inline.
    """

    key: str
    value: AttributeValue
    key_token: Token = b""
    value_token: Token = b""


class ProfileTypes(NamedTuple):
    """String tokens of a profile's sample type and period type (empty without a period)."""

    sample_type: Token
    sample_unit: Token
    period_type: Token
    period_unit: Token


Envelope = tuple[bytes, bytes]
"""The fields of a message before and after its repeated field."""


class Writer:
    """Writes ``ExportProfilesServiceRequest`` in one syntax; stateless and thread-safe."""

    def __init__(self, syntax: Syntax) -> None:
        self.syntax = syntax
        # What is called for each sample, stack or frame is looked up once.
        self._element, self._array, self._long = syntax.element, syntax.array, syntax.long
        self._packed, self._elements = syntax.packed, syntax.elements
        self._text, self._message, self._signed = syntax.text, syntax.message, syntax.signed
        heads = self._heads
        self._tables = heads(
            "bytes mappingTable 1", "bytes locationTable 2", "bytes functionTable 3",
            "bytes linkTable 4", "bytes stringTable 5", "bytes attributeTable 6",
            "bytes stackTable 7",
        )  # fmt: skip
        self._mapping = heads(
            "varint memoryStart 1", "varint memoryLimit 2", "varint fileOffset 3",
            "varint filenameStrindex 4", "bytes attributeIndices 5",
        )  # fmt: skip
        self._location = heads(
            "varint mappingIndex 1", "varint address 2", "bytes lines 3", "bytes attributeIndices 4"
        )
        self._line = heads("varint functionIndex 1", "varint line 2")
        self._function = heads(
            "varint nameStrindex 1", "varint systemNameStrindex 2", "varint filenameStrindex 3"
        )
        self._link = heads("bytes traceId 1", "bytes spanId 2")
        self._attribute = heads("varint keyStrindex 1", "bytes value 2")
        (self._stack,) = heads("bytes locationIndices 1")
        self._sample_identity = heads(
            "varint stackIndex 1", "bytes attributeIndices 2", "varint linkIndex 3"
        )
        self._sample = heads("bytes samples 2", "bytes values 4", "bytes timestampsUnixNano 5")
        self._key_value = heads("bytes key 1", "bytes value 2", "varint keyStrindex 3")
        self._any_scalar = heads(
            "bytes stringValue 1",
            "varint boolValue 2",
            "varint intValue 3",
            "fixed64 doubleValue 4",
        )
        self._array_value = heads("bytes arrayValue 5", "bytes values 1")
        (self._string_index,) = heads("varint stringValueStrindex 8")
        self._resource = heads("bytes resource 1", "bytes attributes 1")
        (self._schema_url,) = heads("bytes schemaUrl 3")
        self._scope = heads(
            "bytes scope 1", "bytes name 1", "bytes version 2", "bytes attributes 3"
        )
        self._profile = heads("bytes profiles 2", "bytes profileId 7", "bytes attributeIndices 11")
        self._profile_envelope = heads(
            "bytes sampleType 1", "fixed64 timeUnixNano 3", "varint durationNano 4",
            "bytes periodType 5", "varint period 6",
        )  # fmt: skip
        self._value_type = heads("varint typeStrindex 1", "varint unitStrindex 2")
        self._group = heads("bytes resourceProfiles 1", "bytes scopeProfiles 2")
        (self._dictionary,) = heads("bytes dictionary 2")

    def _heads(self, *fields: str) -> tuple[bytes, ...]:
        """Heads of fields, given as protobuf's wire type, name in JSON and number."""
        split = [field.split() for field in fields]
        head = self.syntax.head
        return tuple([head(name, int(number), WireType[kind]) for kind, name, number in split])

    def string(self, text: str) -> bytes:
        """Entry of the string table."""
        return self.syntax.text_element(self._tables[STRING], text)

    def mapping(self, place: tuple[int, int, int], filename: Token, attributes: bytes) -> bytes:
        """Entry of the mapping table; its place is start, limit, and offset in the file."""
        *place_heads, filename_index, attribute_indices = self._mapping
        numbers = zip(place_heads, place, strict=True)
        fields = b"".join(
            [head + self._long(number & MASK_64) for head, number in numbers if number]
        )
        if filename:
            fields += filename_index + filename
        if attributes:
            fields += self._array(attribute_indices, attributes)
        return self._element(self._tables[MAPPING], fields)

    def location(
        self, mapping: Token, address: int, lines: Sequence[tuple[Token, int]], attributes: bytes
    ) -> bytes:
        """Entry of the location table; a line is a function's token and a line number."""
        mapping_index, address_head, lines_head, attribute_indices = self._location
        element = self._element
        fields = mapping_index + mapping if mapping else b""
        if address:
            fields += address_head + self._long(address & MASK_64)
        if lines:
            function_index, line_head = self._line
            written = b""
            for function, number in lines:
                line = function_index + function
                written += element(
                    lines_head, line + line_head + self._long(number) if number else line
                )
            fields += self._elements(lines_head, written)
        if attributes:
            fields += self._array(attribute_indices, attributes)
        return element(self._tables[LOCATION], fields)

    def function(self, name: Token, system_name: Token, file: Token) -> bytes:
        """Entry of the function table."""
        name_index, system_name_index, file_index = self._function
        fields = name_index + name if name else b""
        if system_name:
            fields += system_name_index + system_name
        if file:
            fields += file_index + file
        return self._element(self._tables[FUNCTION], fields)

    def link(self, link: SpanLink) -> bytes:
        """Entry of the link table."""
        trace_id, span_id = self._link
        identifier = self.syntax.identifier
        fields = identifier(trace_id, link.trace_id) + identifier(span_id, link.span_id)
        return self._element(self._tables[LINK], fields)

    def attribute(self, key: Token, value: AttributeValue) -> bytes:
        """Entry of the attribute table, without a unit."""
        key_index, value_head = self._attribute
        fields = key_index + key if key else b""
        fields += self._message(value_head, self._any_value(value))
        return self._element(self._tables[ATTRIBUTE], fields)

    def stack(self, locations: bytes) -> bytes:
        """Entry of the stack table."""
        return self._element(self._tables[STACK], self._array(self._stack, locations))

    def sample_attributes(self, attributes: bytes) -> bytes:
        """The attributes of a sample, as :meth:`sample_head` takes them."""
        return self._array(self._sample_identity[1], attributes) if attributes else b""

    def sample_head(self, stack: Token, attributes: bytes, link: Token) -> bytes:
        """The fields of a sample before its timestamps: its identity."""
        stack_index, _, link_index = self._sample_identity
        fields = stack_index + stack + attributes if stack else attributes
        return fields + link_index + link if link else fields

    def sample(self, head: bytes, timestamps: bytes, values: bytes) -> bytes:
        """One sample of a profile; without values each timestamp counts 1.

        Without timestamps there is one value. Timestamps are from :meth:`Syntax.times`, values from
        :meth:`Syntax.longs`; more of either may be appended.
        """
        samples, values_head, timestamps_head = self._sample
        if values:
            head += self._packed(values_head, values)
        if timestamps:
            head += self._packed(timestamps_head, timestamps)
        return self._element(samples, head)

    def key_value(self, attribute: KeyValue) -> bytes:
        """The value of an attribute of a resource or scope, without its head."""
        key, value, key_token, value_token = attribute
        key_head, value_head, key_index = self._key_value
        any_value = self._string_index + value_token if value_token else self._any_value(value)
        fields = b"" if key_token or not key else self._text(key_head, key)
        fields += self._message(value_head, any_value)
        return self._message(b"", fields + key_index + key_token if key_token else fields)

    def _any_value(self, value: AttributeValue) -> bytes:
        """The field of an AnyValue, zero or not, because it determines the type."""
        string, boolean, integer, double = self._any_scalar
        if isinstance(value, str):
            return self._text(string, value)
        if isinstance(value, bool):
            return boolean + self.syntax.boolean(value)
        if isinstance(value, int):
            return integer + self._signed(value)
        if isinstance(value, float):
            return double + self.syntax.double(value)
        array, values = self._array_value
        written = [self._message(b"", self._any_value(one)) for one in value]
        return self._message(array, self.syntax.repeated(values, written))

    def _write_value_type(self, head: bytes, type_: Token, unit: Token) -> bytes:
        type_index, unit_index = self._value_type
        fields = type_index + type_ if type_ else b""
        return self._message(head, fields + unit_index + unit if unit else fields)

    def profile_envelope(self, window: Window, types: ProfileTypes, period: int) -> Envelope:
        """The fields that all profiles of one kind share, around the samples."""
        sample_type, start, duration, period_type, period_head = self._profile_envelope
        duration_ns = window.end_unix_ns - window.start_unix_ns
        after = start + self.syntax.fixed(window.start_unix_ns)
        if duration_ns:
            after += duration + self._long(duration_ns)
        if types.period_type:
            after += self._write_value_type(period_type, types.period_type, types.period_unit)
            after += period_head + self._long(period)
        return self._write_value_type(sample_type, types.sample_type, types.sample_unit), after

    def profile(
        self, envelope: Envelope, samples: bytes, profile_id: bytes, attributes: bytes
    ) -> bytes:
        """One profile with these attributes."""
        profiles, id_head, attribute_indices = self._profile
        fields = self._elements(self._sample[0], samples).join(envelope)
        fields += self.syntax.identifier(id_head, profile_id)
        if attributes:
            fields += self._array(attribute_indices, attributes)
        return self._element(profiles, fields)

    def scope(
        self, name: str, version: str, attributes: Sequence[bytes], schema_url: str
    ) -> Envelope:
        """A ScopeProfiles around its profiles; attributes are from :meth:`key_value`."""
        scope, name_head, version_head, attributes_head = self._scope
        fields = self._text(name_head, name) if name else b""
        if version:
            fields += self._text(version_head, version)
        if attributes:
            fields += self.syntax.repeated(attributes_head, attributes)
        return self._message(scope, fields), self._write_schema_url(schema_url)

    def _write_schema_url(self, url: str) -> bytes:
        return self._text(self._schema_url, url) if url else b""

    def resource(self, attributes: Sequence[bytes], schema_url: str) -> Envelope:
        """A ResourceProfiles around its ScopeProfiles; attributes as in :meth:`scope`."""
        resource, attributes_head = self._resource
        fields = self.syntax.repeated(attributes_head, attributes) if attributes else b""
        return self._message(resource, fields), self._write_schema_url(schema_url)

    def group(self, resource: Envelope, scope: Envelope, profiles: bytes) -> bytes:
        """One ResourceProfiles with these profiles, one after the other."""
        resource_profiles, scope_profiles = self._group
        inner = self._elements(self._profile[0], profiles).join(scope)
        outer = self._elements(scope_profiles, self._element(scope_profiles, inner)).join(resource)
        return self._element(resource_profiles, outer)

    def request(self, groups: Sequence[bytes], tables: Sequence[Sequence[bytes]]) -> bytes:
        """The whole request; the tables are without their zero entries."""
        elements, zero = self._elements, [self._element(head, b"") for head in self._tables]
        zero[STRING] = self.string("")
        rows = zip(self._tables, zero, tables, strict=True)
        fields = [elements(head, first + b"".join(entries)) for head, first, entries in rows]
        dictionary = self._message(self._dictionary, b"".join(fields))
        return self.syntax.request(elements(self._group[0], b"".join(groups)) + dictionary)
