"""Protobuf's syntax, written without its message classes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from otel_kprofiler.model import Form
from otel_kprofiler.otlp.syntax import WireType
from otel_kprofiler.otlp.wire import MASK_64, delimited, double, fixed64, varint
from otel_kprofiler.text import escape_surrogates


class Protobuf:
    """Protobuf; see :class:`otel_kprofiler.otlp.syntax.Syntax`."""

    form = Form.PROTOBUF
    separator = b""
    first_tokens = tuple(map(varint, range(2048)))
    sample_bytes = 4

    token = long = staticmethod(varint)
    fixed = staticmethod(fixed64)
    double = staticmethod(double)
    identifier = array = message = element = packed = staticmethod(delimited)

    def head(self, name: str, number: int, wire_type: WireType) -> bytes:
        """The field's tag."""
        return varint(number << 3 | wire_type)

    def signed(self, value: int) -> bytes:
        """A varint; negative numbers are 64 bits long."""
        return varint(value & MASK_64)

    def boolean(self, value: bool) -> bytes:
        """A varint."""
        return b"\x01" if value else b"\x00"

    def text(self, head: bytes, text: str) -> bytes:
        """UTF-8."""
        try:
            return delimited(head, text.encode())
        except UnicodeEncodeError:
            return delimited(head, escape_surrogates(text).encode())

    text_element = text

    def repeated(self, head: bytes, values: Sequence[bytes]) -> bytes:
        """Each value has a tag of its own."""
        return b"".join([head + value for value in values])

    def elements(self, head: bytes, joined: bytes) -> bytes:
        """Elements have their tags already."""
        return joined

    def times(self, values: Sequence[int]) -> bytes:
        """Eight bytes each."""
        if len(values) == 1:
            return values[0].to_bytes(8, "little")
        return struct.pack(f"<{len(values)}Q", *values)

    def longs(self, values: Sequence[int]) -> bytes:
        """Varints."""
        return b"".join([varint(value & MASK_64) for value in values])

    def request(self, fields: bytes) -> bytes:
        """The fields: the outermost message has no length."""
        return fields
