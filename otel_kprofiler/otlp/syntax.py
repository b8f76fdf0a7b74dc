"""What differs between the serialized forms of OTLP: how fields and their values are written.

A *head* is what precedes the value of a field. Serialized fields are concatenated. Elements of a
repeated field are concatenated too, before :meth:`Syntax.elements` makes them the field.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from otel_kprofiler.model import Form

Token = bytes
"""Serialized index of a table's entry; the empty token is index 0, which is not written."""


class WireType(enum.IntEnum):
    """Protobuf's wire type of a field (https://protobuf.dev/programming-guides/encoding/)."""

    varint = 0
    fixed64 = 1
    bytes = 2


class Syntax(Protocol):
    """One serialized form; stateless and thread-safe."""

    form: Form
    separator: bytes
    """Between the tokens of an array."""
    first_tokens: tuple[Token, ...]
    """Precomputed results of :meth:`token` for the lowest indices."""
    sample_bytes: int
    """Minimum size of a sample besides its head and timestamps."""

    def head(self, name: str, number: int, wire_type: WireType) -> bytes:
        """The head of a field; ``name`` is its name in JSON."""
        ...

    def token(self, index: int) -> Token:
        """The value of an unsigned 32-bit field."""
        ...

    def long(self, value: int) -> bytes:
        """The value of an unsigned 64-bit field that is a varint in protobuf."""
        ...

    def signed(self, value: int) -> bytes:
        """The value of a signed 64-bit field that is a varint in protobuf."""
        ...

    def fixed(self, value: int) -> bytes:
        """The value of a ``fixed64`` field."""
        ...

    def double(self, value: float) -> bytes:
        """The value of a ``double`` field."""
        ...

    def boolean(self, value: bool) -> bytes:
        """The value of a ``bool`` field."""
        ...

    def text(self, head: bytes, text: str) -> bytes:
        """A ``string`` field; lone surrogates are escaped."""
        ...

    def text_element(self, head: bytes, text: str) -> bytes:
        """An element of a repeated ``string`` field, likewise."""
        ...

    def identifier(self, head: bytes, value: bytes) -> bytes:
        """A field with a trace, span or profile id."""
        ...

    def array(self, head: bytes, tokens: bytes) -> bytes:
        """A packed field of tokens, joined by ``separator``."""
        ...

    def message(self, head: bytes, fields: bytes) -> bytes:
        """A field with a message; with an empty head, its value alone."""
        ...

    def repeated(self, head: bytes, values: Sequence[bytes]) -> bytes:
        """A repeated field of the values of messages."""
        ...

    def element(self, head: bytes, fields: bytes) -> bytes:
        """A message that is an element of a repeated field."""
        ...

    def elements(self, head: bytes, joined: bytes) -> bytes:
        """A repeated field of concatenated elements."""
        ...

    def times(self, values: Sequence[int]) -> bytes:
        """Elements of a packed ``fixed64`` field."""
        ...

    def longs(self, values: Sequence[int]) -> bytes:
        """Elements of a packed 64-bit field of varints."""
        ...

    def packed(self, head: bytes, joined: bytes) -> bytes:
        """A packed field of concatenated elements from :meth:`times` or :meth:`longs`."""
        ...

    def request(self, fields: bytes) -> bytes:
        """A whole request."""
        ...
