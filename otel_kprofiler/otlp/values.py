"""Converts attribute values to Python values, within limits.

Attributes can be nested and refer to strings in the dictionary, so an expanded value can be far
larger than the message that contains it. The total size of the resulting text is therefore limited.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import AttributeScalar, AttributeValue

MAX_WRITTEN_CHARS: Final = 16 * 1024 * 1024
"""Maximum number of characters created from a message's maps, bytes and nested lists."""
MAX_DEPTH: Final = 64


class Values:
    """Converts the AnyValues in a message. Indices outside ``strings`` raise ``IndexError``."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._remaining = MAX_WRITTEN_CHARS

    def read(self, value: Any) -> AttributeValue:
        """Convert an AnyValue. Values that attributes cannot hold become strings (maps as JSON).

        Raises ``PayloadError`` if the value is nested too deeply, or is too large.
        """
        if value.WhichOneof("value") == "array_value":
            return tuple(map(self._item, value.array_value.values))
        return self._item(value)

    def read_all(self, attributes: Any) -> Iterator[tuple[str, AttributeValue]]:
        """Yields keys and values of resource or scope attributes, given inline or by reference."""
        for attribute in attributes:
            yield self._key(attribute), self.read(attribute.value)

    def _item(self, value: Any) -> AttributeScalar:
        plain = self._plain(value, 0)
        scalar: AttributeScalar = json.dumps(plain) if isinstance(plain, list | dict) else plain
        return scalar

    def _plain(self, value: Any, depth: int) -> Any:
        which = value.WhichOneof("value")
        if which == "string_value_strindex":
            text = self._strings[value.string_value_strindex]
            return self._take(text) if depth else text
        if which == "bytes_value":
            return self._take(value.bytes_value.hex())
        if which not in ("array_value", "kvlist_value"):
            return getattr(value, which) if which else ""
        if depth == MAX_DEPTH:
            raise PayloadError(f"an attribute is nested more than {MAX_DEPTH} levels deep")
        if which == "array_value":
            return [self._plain(item, depth + 1) for item in value.array_value.values]
        items = value.kvlist_value.values
        return {self._take(self._key(item)): self._plain(item.value, depth + 1) for item in items}

    def _key(self, attribute: Any) -> str:
        return str(attribute.key or self._strings[attribute.key_strindex])

    def _take(self, text: str) -> str:
        self._remaining -= len(text)
        if self._remaining < 0:
            raise PayloadError(
                f"the attributes in a message exceed {MAX_WRITTEN_CHARS >> 20} MiB of text"
            )
        return text


def as_text(value: AttributeValue) -> str:
    """Returns a value as a string; an empty string for a list."""
    if isinstance(value, str):
        return value
    return "" if isinstance(value, tuple) else str(value)


def as_integer(value: AttributeValue | None) -> int:
    """Convert a number or numeric string to an integer; 0 for anything else."""
    try:
        return int(value) if isinstance(value, int | str) else 0
    except ValueError:
        return 0
