"""What the encoder needs of a serialized form: bytes of each entry, exact sizes of the rest.

A *token* is the serialized index of a table's entry (a varint, or decimal digits); the empty
token is index 0, which is not written. Entries and samples are complete in themselves, so
that the size of a request is a sum plus a few length prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from otel_kprofiler.model import AttributeValue, Form, SpanLink, Window

Token = bytes

MAPPING, LOCATION, FUNCTION, LINK, STRING, ATTRIBUTE, STACK = range(7)
"""Tables of the dictionary in the order of their field numbers."""


class KeyValue(NamedTuple):
    """An attribute of a resource or scope.

    ``key_token`` and ``value_token`` refer to strings of the dictionary; where they are empty,
    the text itself is written.
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


class Around(NamedTuple):
    """The constant bytes around the samples of one ResourceProfiles, from inside to outside."""

    profile: tuple[bytes, bytes]
    scope_profiles: tuple[bytes, bytes]
    resource_profiles: tuple[bytes, bytes]


class Header(NamedTuple):
    """What a ResourceProfiles with one profile says besides the samples.

    Attributes of scope and resource are as :meth:`Writer.key_value` writes them.
    """

    window: Window
    types: ProfileTypes
    profile_id: bytes
    scope_name: str
    scope_version: str
    scope_attributes: tuple[bytes, ...]
    scope_schema_url: str
    resource_attributes: tuple[bytes, ...]
    resource_schema_url: str
    attributes: bytes = b""


def clean(text: str) -> str:
    """The text as it can be encoded: lone surrogates become question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


class Writer(Protocol):
    """Writes one serialized form; has no state."""

    form: Form
    separator: bytes
    """Between the tokens of an array."""

    def token(self, index: int) -> Token:
        """The serialized index."""
        ...

    def table_overhead(self) -> int:
        """Bytes of a dictionary's body whose tables hold only their zero entries."""
        ...

    def string(self, text: str) -> bytes:
        """Entry of the string table; the text is clean already."""
        ...

    def mapping(self, limit: int, filename: Token, attributes: bytes) -> bytes:
        """Entry of the mapping table; it starts at 0."""
        ...

    def location(
        self, mapping: Token, address: int, lines: Sequence[tuple[Token, int]], attributes: bytes
    ) -> bytes:
        """Entry of the location table; a line is a function's token and a line number."""
        ...

    def function(self, name: Token, system_name: Token, file: Token) -> bytes:
        """Entry of the function table."""
        ...

    def link(self, link: SpanLink) -> bytes:
        """Entry of the link table."""
        ...

    def attribute(self, key: Token, value: AttributeValue) -> bytes:
        """Entry of the attribute table, without a unit."""
        ...

    def stack(self, locations: bytes) -> bytes:
        """Entry of the stack table."""
        ...

    def sample_head(self, stack: Token, attributes: bytes, link: Token) -> bytes:
        """The fields of a sample before its timestamps: its identity."""
        ...

    def timestamps(self, times_unix_ns: Sequence[int]) -> bytes:
        """Timestamps of a sample; more may be appended."""
        ...

    def sample(self, head: bytes, timestamps: bytes) -> bytes:
        """One sample of a profile."""
        ...

    def sample_size(self, head: int, timestamps: int) -> int:
        """Length of :meth:`sample` from the lengths of its parts."""
        ...

    def key_value(self, attribute: KeyValue) -> bytes:
        """An attribute of a resource or scope."""
        ...

    def around(self, header: Header) -> Around:
        """Everything of a ResourceProfiles but its samples."""
        ...

    def group(self, around: Around, samples: Iterable[bytes]) -> bytes:
        """One ResourceProfiles with one profile."""
        ...

    def group_size(self, around: Around, samples: int) -> int:
        """Length of :meth:`group` from the length of its samples."""
        ...

    def request(self, groups: Sequence[bytes], tables: Sequence[Sequence[bytes]]) -> bytes:
        """The whole request; the tables are without their zero entries."""
        ...

    def request_size(self, groups: int, dictionary: int) -> int:
        """Length of :meth:`request`; the dictionary's includes :meth:`table_overhead`."""
        ...
