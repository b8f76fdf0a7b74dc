"""Finds and checks references from messages to the dictionary's tables, by field name."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from otel_kprofiler.errors import PayloadError

STRINGS: Final = "string_table"
_TABLES: Final = {
    "attribute_indices": "attribute_table", "location_indices": "location_table",
    "mapping_index": "mapping_table", "function_index": "function_table",
    "stack_index": "stack_table", "link_index": "link_table",
}  # fmt: skip


def find_table(field: str) -> str | None:
    """Returns the table that a field with this name refers to."""
    return STRINGS if field.endswith("_strindex") else _TABLES.get(field)


def find_places(message: Any, where: str = "") -> Iterator[tuple[str, str, int]]:
    """Yields the path, the table and the value of each index in a message and its submessages.

    ``where`` is the message's path. Skips unset indices, except in lists.
    """
    for field, value in message.ListFields():
        table = find_table(field.name)
        if not table and not field.message_type:
            continue
        path = f"{where}.{field.name}" if where else field.name
        items = (
            [(f"{path}[{at}]", item) for at, item in enumerate(value)]
            if field.is_repeated
            else [(path, value)]
        )
        for place, item in items:
            if table:
                yield place, table, item
            else:
                yield from find_places(item, place)


def find_references(message: Any) -> Iterator[tuple[str, int]]:
    """Yields the table name and the value of each index in a message and its submessages."""
    for field, value in message.ListFields():
        values = value if field.is_repeated else (value,)
        if table := find_table(field.name):
            for index in values:
                yield table, index
        elif field.message_type:
            for inner in values:
                yield from find_references(inner)


def find_used(message: Any, dictionary: Any) -> dict[str, set[int]]:
    """Returns the indices of the zero entry and of all entries that a request uses, by table.

    Includes entries that are used only by other entries. ``dictionary`` holds the tables to which
    the indices refer.
    """
    used = {field.name: {0} for field in dictionary.DESCRIPTOR.fields}
    pending = {
        reference
        for resource_profiles in message.resource_profiles
        for reference in find_references(resource_profiles)
    }
    while pending:
        table, index = pending.pop()
        entries = getattr(dictionary, table)
        if index in used[table] or not 0 <= index < len(entries):
            continue
        used[table].add(index)
        if table != STRINGS:
            pending |= set(find_references(entries[index]))
    return used


def find_outside(message: Any) -> Iterator[tuple[str, str]]:
    """Yields the path of each out-of-range table index, and a description of the problem."""
    tables = message.dictionary.DESCRIPTOR.fields
    sizes = {field.name: len(getattr(message.dictionary, field.name)) for field in tables}
    for where, table, index in find_places(message):
        # Index 0 means "unset", even in an empty table.
        if not 0 <= index < max(1, sizes[table]):
            yield where, f"index {index} is outside {table} [0, {sizes[table]})"


def check_indices(message: Any) -> None:
    """Raise ``PayloadError`` if an index in a request is out of range for its table."""
    if any(find_outside(message)):
        raise outside_error()


def outside_error() -> PayloadError:
    """Returns the error for a request that contains an out-of-range table index."""
    return PayloadError(
        "an index points outside its table", hint="find it with `otel-kprofiler check FILE`"
    )


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
