"""Defines the interface between the encoder and the protobuf and JSON writers.

A *token* is the serialized index of a table entry: a varint, or decimal digits. An empty token
represents index 0, which is not written. Entries and samples are self-contained, so the size of a
request is the sum of the sizes of its entries and samples, plus a few length prefixes.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from otel_kprofiler.model import AttributeValue, Form, SpanLink, Window

Token = bytes

MAPPING, LOCATION, FUNCTION, LINK, STRING, ATTRIBUTE, STACK = range(7)
"""Dictionary tables, in field number order."""


class KeyValue(NamedTuple):
    """An attribute of a resource or scope. Strings without tokens are written inline."""

    key: str
    value: AttributeValue
    key_token: Token = b""
    value_token: Token = b""


class ProfileTypes(NamedTuple):
    """String tokens for a profile's types and units; without a period, its tokens are empty."""

    sample_type: Token
    sample_unit: Token
    period_type: Token
    period_unit: Token


Envelope = tuple[bytes, bytes]
"""Bytes before and after the repeated part of a message."""


class Writer(Protocol):
    """Serializes messages as protobuf or JSON; stateless and thread-safe."""

    form: Form
    separator: bytes
    first_tokens: tuple[Token, ...]
    """Precomputed results of :meth:`token` for the lowest indices."""
    sample_bytes: int
    """The minimum size of a sample, in bytes, excluding timestamps and the result of
    :meth:`sample_head`."""

    def token(self, index: int) -> Token:
        """Serialize an index."""

    def string(self, text: str) -> bytes:
        """Returns an entry for the string table. The string must not contain surrogates."""

    def mapping(self, place: tuple[int, int, int], filename: Token, attributes: bytes) -> bytes:
        """Returns a mapping table entry. ``place`` is a tuple of start, limit and file offset."""

    def location(
        self, mapping: Token, address: int, lines: Sequence[tuple[Token, int]], attributes: bytes
    ) -> bytes:
        """Returns an entry in the location table. A line is a function token and a line number."""

    def raw_location(self, address: int, attributes: bytes) -> bytes:
        """Returns a location table entry that contains only an address and attributes."""

    def location_attributes(self, attributes: bytes) -> bytes:
        """Returns the encoded attributes for a location, given their tokens."""

    def function(self, name: Token, system_name: Token, file: Token, start_line: int) -> bytes:
        """Returns an entry of the function table."""

    def link(self, link: SpanLink) -> bytes:
        """Returns an entry of the link table."""

    def attribute(self, key: Token, value: AttributeValue) -> bytes:
        """Returns an entry for the attribute table, without a unit."""

    def stack(self, locations: bytes) -> bytes:
        """Returns an entry in the stack table."""

    def sample_attributes(self, attributes: bytes) -> bytes:
        """Returns a sample's attributes, as an argument for :meth:`sample_head`."""

    def sample_head(self, stack: Token, attributes: bytes, link: Token) -> bytes:
        """Returns the fields that identify a sample, which precede the sample's timestamps."""

    def timestamps(self, times_unix_ns: Sequence[int]) -> bytes:
        """Serializes a sample's timestamps. The results of several calls may be concatenated."""

    def values(self, values: Sequence[int]) -> bytes:
        """Serializes a sample's values, one per timestamp. Several results may be concatenated."""

    def sample(self, head: bytes, timestamps: bytes, values: bytes) -> bytes:
        """Returns a sample of a profile. If ``values`` is empty, each timestamp counts as 1.

        A sample without timestamps has a single value.
        """

    def key_value(self, attribute: KeyValue) -> bytes:
        """Returns an attribute of a resource or scope."""

    def profile_envelope(self, window: Window, types: ProfileTypes, period: int) -> Envelope:
        """Returns the fields that surround the samples and are equal in all profiles of a kind."""

    def profile(
        self, envelope: Envelope, samples: bytes, profile_id: bytes, attributes: bytes
    ) -> bytes:
        """Returns one profile with the given attributes."""

    def scope(
        self, name: str, version: str, attributes: Sequence[bytes], schema_url: str
    ) -> Envelope:
        """Returns a ScopeProfiles without profiles; ``attributes`` are from :meth:`key_value`."""

    def resource(self, attributes: Sequence[bytes], schema_url: str) -> Envelope:
        """Returns a ResourceProfiles without its ScopeProfiles."""

    def group(self, resource: Envelope, scope: Envelope, profiles: bytes) -> bytes:
        """Returns one ResourceProfiles with the given profiles, in order."""

    def request(self, groups: Sequence[bytes], tables: Sequence[Sequence[bytes]]) -> bytes:
        """Returns the whole request. ``tables`` must not contain the zero entries (index 0)."""
