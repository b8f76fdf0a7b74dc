"""Finds references from messages to their dictionary's tables, by field name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

STRINGS: Final = "string_table"
_TABLES: Final = {
    "attribute_indices": "attribute_table", "location_indices": "location_table",
    "mapping_index": "mapping_table", "function_index": "function_table",
    "stack_index": "stack_table", "link_index": "link_table",
}  # fmt: skip


def find_table(field: str) -> str | None:
    """Returns the table to which a field with this name refers."""
    return STRINGS if field.endswith("_strindex") else _TABLES.get(field)


def find_references(message: Any) -> Iterator[tuple[str, int]]:
    """Yields the tables and indices that a message and its submessages refer to."""
    for field, value in message.ListFields():
        values = value if field.is_repeated else (value,)
        if table := find_table(field.name):
            for index in values:
                yield table, index
        elif field.message_type:
            for inner in values:
                yield from find_references(inner)


def renumber_references(message: Any, renumber: Callable[[str, int], int]) -> None:
    """Replace each index in a message and its submessages with ``renumber(table, index)``."""
    for field, value in message.ListFields():
        table = find_table(field.name)
        if table and field.is_repeated:
            value[:] = [renumber(table, index) for index in value]
        elif table:
            setattr(message, field.name, renumber(table, value))
        elif field.message_type:
            for inner in value if field.is_repeated else (value,):
                renumber_references(inner, renumber)
