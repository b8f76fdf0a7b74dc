"""Registers the rules that check OTLP profiles, and looks up indices in the checked messages."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from otel_kprofiler.model import KERNEL_SIDE
from otel_kprofiler.otlp.conventions import FRAME_TYPE

TABLES: Final = (
    "mapping_table", "location_table", "function_table", "link_table",
    "string_table", "attribute_table", "stack_table",
)  # fmt: skip

_MAX_CHARS: Final = 512
"""Strings are truncated to this many characters before being checked or shown in messages."""


class Violation(NamedTuple):
    """A violation of a rule. ``where`` is a field, such as ``dictionary.stack_table[3]``."""

    rule: str
    where: str
    message: str


Problem = tuple[str, str]


Find = Callable[["Contents"], Iterator[Problem]]


class Rule(NamedTuple):
    """The description of a rule, and the function that finds its violations."""

    promise: str
    find: Find


def registry(rules: dict[str, Rule]) -> Callable[[Find], Find]:
    """Returns a decorator that registers a rule. The function's docstring describes the rule."""

    def rule(find: Find) -> Find:
        rules[find.__name__.replace("_", "-")] = Rule((find.__doc__ or "").rstrip("."), find)
        return find

    return rule


class Place(NamedTuple):
    """A message and its path."""

    where: str
    value: Any


class Contents:
    """A request with its profiles, samples and attributes resolved.

    An index out of range resolves to the zero value, so that each rule works on payloads that
    violate other rules.
    """

    def __init__(self, message: Any) -> None:
        self.message = message
        self.dictionary = message.dictionary
        self._whole: list[str] = list(self.dictionary.string_table)
        # Truncate the strings: thousands of entries may refer to the same long string.
        self.strings = [text[:_MAX_CHARS] for text in self._whole]
        self.resources = list(_places("resource_profiles", message.resource_profiles))
        self.scopes = [
            inner
            for where, value in self.resources
            for inner in _places(f"{where}.scope_profiles", value.scope_profiles)
        ]
        self.profiles = [
            inner
            for where, value in self.scopes
            for inner in _places(f"{where}.profiles", value.profiles)
        ]
        self.samples = [
            inner
            for where, value in self.profiles
            for inner in _places(f"{where}.samples", value.samples)
        ]

    def table(self, name: str) -> Iterator[Place]:
        """Returns the entries in a table except the first, which is the zero value."""
        entries = _places(f"dictionary.{name}", getattr(self.dictionary, name))
        next(entries, None)
        return entries

    def entry(self, name: str, index: int) -> Any:
        """Returns an entry of a table; None if the index is out of range."""
        table = getattr(self.dictionary, name)
        return table[index] if 0 <= index < len(table) else None

    def string(self, index: int) -> str:
        """Returns the string at an index, truncated if long; empty if the index is 0 or invalid."""
        return self.strings[index] if 0 < index < len(self.strings) else ""

    def attribute_lists(self) -> Iterator[Place]:
        """Yields all messages with ``attribute_indices``."""
        yield from self.profiles
        yield from self.samples
        yield from self.table("mapping_table")
        yield from self.table("location_table")

    def attributes(self, indices: Iterable[int]) -> dict[str, Any]:
        """Returns the AnyValue of each attribute in ``indices``, keyed by attribute name."""
        entries = [self.entry("attribute_table", index) for index in indices]
        return {self.string(entry.key_strindex): entry.value for entry in entries if entry}

    def key_values(self) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
        """Yields the path and the attributes (key and KeyValue) of each resource and scope."""
        for where, value in self.resources:
            yield f"{where}.resource", self._resolved(value.resource.attributes)
        for where, value in self.scopes:
            yield f"{where}.scope", self._resolved(value.scope.attributes)

    def _resolved(self, attributes: Any) -> list[tuple[str, Any]]:
        return [(item.key or self.string(item.key_strindex), item) for item in attributes]

    def text(self, value: Any) -> str:
        """Returns the string in an AnyValue, inline or by reference; empty for other types."""
        index = value.string_value_strindex
        return value.string_value or (self._whole[index] if self.string(index) else "")

    def is_kernel(self, location: Any) -> bool:
        """Returns whether a location is a kernel frame."""
        value = self.attributes(location.attribute_indices).get(FRAME_TYPE)
        return value is not None and value.string_value == KERNEL_SIDE.frame_type


def _places(where: str, values: Iterable[Any]) -> Iterator[Place]:
    for index, value in enumerate(values):
        yield Place(f"{where}[{index}]", value)
