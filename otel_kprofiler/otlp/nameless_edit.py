"""Edits a request's dictionary: adds functions to locations, and removes unused entries.

A protobuf message and the JSON from which it was parsed are edited identically, in place.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, NamedTuple

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import Line
from otel_kprofiler.otlp.conventions import FUNCTION_START, UNRESOLVED
from otel_kprofiler.otlp.references import STRINGS, find_references, find_table, renumber_references
from otel_kprofiler.text import escape_surrogates

_ATTRIBUTES: Final = "attribute_table"


class Edit(NamedTuple):
    """Additions to the dictionary in an OTLP message.

    Attributes:
        functions: appended functions, each as the string indices of its name, system name and file.
        locations: new lines (function index and line number) and attributes, by location index.
        reasons: indices of the attributes that explain missing names.
    """

    strings: list[str]
    functions: list[tuple[int, int, int]]
    locations: dict[int, tuple[list[tuple[int, int]], list[int]]]
    reasons: frozenset[int]


def add_lines(message: Any, tree: Any, lines: Mapping[int, Sequence[Line]]) -> None:
    """Add functions to locations, and remove the attributes that explain missing names.

    All indices in the message must be within its tables. ``tree`` is the JSON from which the
    message was parsed, and receives the same changes; None for protobuf. ``lines`` maps location
    indices to functions, innermost inlined function first.
    """
    if not lines:
        return
    edit = _plan(message.dictionary, lines)
    _edit_message(message.dictionary, edit)
    if tree is not None:
        _edit_tree(tree["dictionary"], edit)
    table = message.dictionary.attribute_table
    strings = {at for index in edit.reasons for _, at in find_references(table[index])}
    _drop_unused(message, tree, _ATTRIBUTES, edit.reasons)
    _drop_unused(message, tree, STRINGS, strings)


def _plan(dictionary: Any, lines: Mapping[int, Sequence[Line]]) -> Edit:
    reasons = frozenset(
        index
        for index, entry in enumerate(dictionary.attribute_table)
        if index and dictionary.string_table[entry.key_strindex] in (UNRESOLVED, FUNCTION_START)
    )
    new = _NewFunctions(dictionary)
    keys = set(map(_key, dictionary.location_table))
    locations = {}
    for index, functions in lines.items():
        entry = dictionary.location_table[index]
        made = [(new.function(line), line.line) for line in functions]
        attributes = [at for at in entry.attribute_indices if at not in reasons]
        key = (entry.mapping_index, entry.address, tuple(made), frozenset(attributes))
        if key in keys:  # without the reason, two locations would be equal
            attributes = list(entry.attribute_indices)
        keys.add(key)
        locations[index] = made, attributes
    return Edit(new.strings, new.functions, locations, reasons)


class _NewFunctions:
    def __init__(self, dictionary: Any) -> None:
        self.strings: list[str] = []
        self.functions: list[tuple[int, int, int]] = []
        self._strings: dict[str, int] = {}
        self._functions: dict[tuple[int, int, int], int] = {}
        for index, text in enumerate(dictionary.string_table):
            self._strings.setdefault(text, index)
        for index, entry in enumerate(dictionary.function_table):
            place = entry.name_strindex, entry.system_name_strindex, entry.filename_strindex
            if not entry.start_line:
                self._functions.setdefault(place, index)
        self._next_string = len(dictionary.string_table)
        self._next_function = max(len(dictionary.function_table), 1)

    def function(self, line: Line) -> int:
        place = self._string(line.function), self._string(line.system_name), self._string(line.file)
        if place not in self._functions:
            self._functions[place] = self._next_function + len(self.functions)
            self.functions.append(place)
        return self._functions[place]

    def _string(self, text: str) -> int:
        text = escape_surrogates(text)
        if text not in self._strings:
            self._strings[text] = self._next_string + len(self.strings)
            self.strings.append(text)
        return self._strings[text]


def _key(location: Any) -> tuple[Any, ...]:
    lines = tuple((line.function_index, line.line) for line in location.lines)
    return location.mapping_index, location.address, lines, frozenset(location.attribute_indices)


def _edit_message(dictionary: Any, edit: Edit) -> None:
    dictionary.string_table.extend(edit.strings)
    if edit.functions and not dictionary.function_table:
        dictionary.function_table.add()
    for name, system_name, file in edit.functions:
        dictionary.function_table.add(
            name_strindex=name, system_name_strindex=system_name, filename_strindex=file
        )
    for index, (lines, attributes) in edit.locations.items():
        location = dictionary.location_table[index]
        for function, number in lines:
            location.lines.add(function_index=function, line=number)
        location.attribute_indices[:] = attributes


def _edit_tree(dictionary: dict[str, Any], edit: Edit) -> None:
    _entries(dictionary, STRINGS).extend(edit.strings)
    functions = _entries(dictionary, "function_table")
    if edit.functions and not functions:
        functions.append({})
    for place in edit.functions:
        keys = ("nameStrindex", "systemNameStrindex", "filenameStrindex")
        functions.append({key: at for key, at in zip(keys, place, strict=True) if at})
    locations = _entries(dictionary, "location_table")
    for index, (lines, attributes) in edit.locations.items():
        location = locations[index]
        location["lines"] = [
            {"functionIndex": function, **({"line": str(number)} if number else {})}
            for function, number in lines
        ]
        _entries(location, "attribute_indices")[:] = attributes


def _entries(node: dict[str, Any], name: str) -> list[Any]:
    """Returns a list field, under its JSON name or the protobuf name that some producers write."""
    entries: Any = node.setdefault(name if name in node else _camel(name), [])
    if not isinstance(entries, list) or (name in node and _camel(name) in node):
        raise PayloadError(f"{name} is not a list, or appears twice")
    return entries


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def _drop_unused(message: Any, tree: Any, table: str, candidates: AbstractSet[int]) -> None:
    """Remove unreferenced ``candidates`` from a table, and renumber the remaining entries."""
    used = {index for name, index in find_references(message) if name == table}
    unused = sorted(candidates - used - {0})
    if not unused:
        return

    def renumber(name: str, index: int) -> int:
        return index - bisect_left(unused, index) if name == table else index

    entries = [getattr(message.dictionary, table)]
    renumber_references(message, renumber)
    if tree is not None:
        entries.append(_entries(tree["dictionary"], table))
        _renumber_tree(tree, renumber)
    for table_entries in entries:
        for index in reversed(unused):
            del table_entries[index]


def _renumber_tree(node: Any, renumber: Callable[[str, int], int]) -> None:
    if isinstance(node, list):
        for inner in node:
            _renumber_tree(inner, renumber)
    elif isinstance(node, dict):
        for key, value in node.items():
            table = find_table(_snake(key))
            if table and isinstance(value, list):
                value[:] = [renumber(table, int(index)) for index in value]
            elif table and value:
                if not isinstance(value, int | str) or key.lower().endswith("indices"):
                    raise PayloadError(f"{key} has an unexpected type")
                node[key] = renumber(table, int(value))
            elif not table:
                _renumber_tree(value, renumber)


def _snake(key: str) -> str:
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in key)
