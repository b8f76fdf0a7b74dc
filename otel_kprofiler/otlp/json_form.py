"""JSON's syntax by OTLP's mapping.

lowerCamelCase keys, 64-bit integers as strings, 32-bit ones as numbers, ids as hexadecimal text.
Fields and elements start with a comma, which is stripped from the first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from otel_kprofiler.model import Form
from otel_kprofiler.otlp.syntax import Token, WireType
from otel_kprofiler.text import escape_surrogates


def _quoted(text: str) -> bytes:
    try:
        return json.dumps(text, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(escape_surrogates(text), ensure_ascii=False).encode()


class Json:
    """One line of JSON; see :class:`otel_kprofiler.otlp.syntax.Syntax`."""

    form = Form.JSON
    separator = b","
    first_tokens: tuple[Token, ...] = ()
    sample_bytes = len(b',{"timestampsUnixNano":[]}') - len(b",")

    def head(self, name: str, number: int, wire_type: WireType) -> bytes:
        """A comma and the key."""
        return b',"%b":' % name.encode()

    def token(self, index: int) -> Token:
        """A number."""
        return b"%d" % index

    def long(self, value: int) -> bytes:
        """A string, because JavaScript's numbers have 53 bits."""
        return b'"%d"' % value

    signed = fixed = long

    def double(self, value: float) -> bytes:
        """A number, or a string if it is not finite."""
        if math.isfinite(value):
            return json.dumps(value).encode()
        return b'"NaN"' if math.isnan(value) else b'"Infinity"' if value > 0 else b'"-Infinity"'

    def boolean(self, value: bool) -> bytes:
        """``true`` or ``false``."""
        return b"true" if value else b"false"

    def text(self, head: bytes, text: str) -> bytes:
        """A string in UTF-8."""
        return head + _quoted(text)

    def text_element(self, head: bytes, text: str) -> bytes:
        """A string in UTF-8."""
        return b"," + _quoted(text)

    def identifier(self, head: bytes, value: bytes) -> bytes:
        """Hexadecimal text; base64 by protobuf's own mapping."""
        return b'%b"%b"' % (head, value.hex().encode())

    def array(self, head: bytes, tokens: bytes) -> bytes:
        """An array of numbers."""
        return b"%b[%b]" % (head, tokens)

    def message(self, head: bytes, fields: bytes) -> bytes:
        """An object."""
        return b"%b{%b}" % (head, fields[1:])

    def repeated(self, head: bytes, values: Sequence[bytes]) -> bytes:
        """An array of objects."""
        return b"%b[%b]" % (head, b",".join(values))

    def element(self, head: bytes, fields: bytes) -> bytes:
        """An object; the array has the key."""
        return b",{%b}" % fields[1:]

    def elements(self, head: bytes, joined: bytes) -> bytes:
        """An array."""
        return b"%b[%b]" % (head, joined[1:])

    packed = elements

    def times(self, values: Sequence[int]) -> bytes:
        """Strings."""
        return b"".join([b',"%d"' % value for value in values])

    longs = times

    def request(self, fields: bytes) -> bytes:
        """An object."""
        return b"{%b}" % fields[1:]
