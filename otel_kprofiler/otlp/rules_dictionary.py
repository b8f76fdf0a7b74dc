"""Rules for the OTLP dictionary: tables, table entries, and references to entries."""

import re
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any, Final

from otel_kprofiler.otlp import conventions as names
from otel_kprofiler.otlp.references import find_outside, find_places, find_used
from otel_kprofiler.otlp.rules import TABLES, Contents, Problem, Rule, registry

RULES: Final[dict[str, Rule]] = {}
rule = registry(RULES)

_KERNEL_HALF: Final = 1 << 63
_UCUM_ATOM: Final = r"(?:[KMGTkmgtun]i?)?(?:By|bit|s|g|m|Hz|J|W|V|A|K|Cel)|min|h|d|%|1|\{[!-z|~]+\}"
_UCUM: Final = re.compile(rf"(?:{_UCUM_ATOM})(?:[/.](?:{_UCUM_ATOM}))*")
_HEX: Final = re.compile(r"(?:[0-9a-f]{2})+")
_HTLHASH: Final = re.compile(r"[0-9a-f]{32}")
_OFFSET_OR_MODULE: Final = re.compile(r"\+0x[0-9a-f]+|\s\[.*\]$")


@rule
def zero_entries(contents: Contents) -> Iterator[Problem]:
    """Each table must start with its zero value, such as an empty Link or an empty attribute."""
    for name in TABLES:
        table = getattr(contents.dictionary, name)
        where = f"dictionary.{name}"
        if not table:
            yield where, "is empty; it must have the zero value at index 0"
        elif name == "string_table":
            if table[0]:
                yield f"{where}[0]", f"must be the empty string, not {contents.strings[0]!r}"
        elif any(  # an empty AnyValue counts as unset
            field.name != "value" or value.WhichOneof("value")
            for field, value in table[0].ListFields()
        ):
            yield f"{where}[0]", "must be the zero value"


@rule
def index_range(contents: Contents) -> Iterator[Problem]:
    """Every index must lie within its table."""
    yield from find_outside(contents.message)


@rule
def no_orphans(contents: Contents) -> Iterator[Problem]:
    """Every entry must be used by a resource, scope or sample, directly or indirectly."""
    used = find_used(contents.message, contents.dictionary)
    for name in TABLES:
        for index in range(1, len(getattr(contents.dictionary, name))):
            if index not in used[name]:
                yield f"dictionary.{name}[{index}]", "is not used"


_INWARD: Final = (
    "string_table", "attribute_table", "link_table", "mapping_table",
    "function_table", "location_table", "stack_table",
)  # fmt: skip
"""Tables, ordered so that each table refers only to earlier tables."""


@rule
def no_duplicates(contents: Contents) -> Iterator[Problem]:
    """A table must not contain two entries that are equal after their references are resolved."""
    first_of: dict[str, list[int]] = {}
    for name in _INWARD:
        seen: dict[Hashable, int] = {}
        first_of[name] = []
        for index, entry in enumerate(getattr(contents.dictionary, name)):
            first = seen.setdefault(_value(entry, first_of), index)
            first_of[name].append(first)
            if first != index:
                yield f"dictionary.{name}[{index}]", f"has the value of index {first}"


def _value(entry: Any, first_of: dict[str, list[int]]) -> Hashable:
    """Returns an entry's value, with each index replaced by that of the first equal entry."""
    if isinstance(entry, str):
        return entry
    plain = [
        (field.name, value.SerializeToString(deterministic=True) if field.message_type else value)
        for field, value in entry.ListFields()
        if field.name != "lines" and not field.name.endswith(("_strindex", "_index", "_indices"))
    ]
    lines = getattr(entry, "lines", ())
    plain += [(str(at), (line.line, line.column)) for at, line in enumerate(lines)]
    ordered = []
    unordered = set()
    for where, table, index in find_places(entry):
        firsts = first_of.get(table, [])
        target = firsts[index] if 0 <= index < len(firsts) else index
        if where.startswith("attribute_indices"):
            unordered.add(target)
        else:
            ordered.append((where, target))
    return (tuple(plain), tuple(ordered), frozenset(unordered))


@rule
def attribute_index_unset(contents: Contents) -> Iterator[Problem]:
    """``attribute_indices`` must not contain 0, which means unset."""
    for where, owner in contents.attribute_lists():
        if 0 in owner.attribute_indices:
            yield f"{where}.attribute_indices", "contains index 0"


@rule
def attribute_keys_unique(contents: Contents) -> Iterator[Problem]:
    """Attribute keys must be unique within a profile, sample, mapping or location."""
    for where, owner in contents.attribute_lists():
        entries = [contents.entry("attribute_table", index) for index in owner.attribute_indices]
        keys = Counter(contents.string(entry.key_strindex) for entry in entries if entry)
        for key in sorted(key for key, count in keys.items() if count > 1 and key):
            yield f"{where}.attribute_indices", f"key {key!r} occurs more than once"


@rule
def attribute_values(contents: Contents) -> Iterator[Problem]:
    """Attributes must have a key and a value. Strings must be inline: Collectors ignore indices."""
    for where, entry in contents.table("attribute_table"):
        which = entry.value.WhichOneof("value")
        if not contents.string(entry.key_strindex):
            yield where, "has no key"
        if which is None:
            yield where, "has no value"
        elif which == "string_value_strindex":
            yield where, "refers to its string instead of containing it"


@rule
def units(contents: Contents) -> Iterator[Problem]:
    """Units must be UCUM codes or unset."""
    for where, entry in contents.table("attribute_table"):
        unit = contents.string(entry.unit_strindex)
        if unit and not _UCUM.fullmatch(unit):
            yield f"{where}.unit_strindex", f"{unit!r} is not a UCUM code"


@rule
def integer_attributes(contents: Contents) -> Iterator[Problem]:
    """Attributes that the conventions define as integers must be integers."""
    values = [
        (f"dictionary.attribute_table[{index}]", contents.string(entry.key_strindex), entry.value)
        for index, entry in enumerate(contents.dictionary.attribute_table)
    ]
    for where, attributes in contents.key_values():
        values += [(f"{where}.attributes", key, item.value) for key, item in attributes]
    for where, key, value in values:
        if key in names.INTEGER_ATTRIBUTES and value.WhichOneof("value") != "int_value":
            yield where, f"{key} must be an int_value"


@rule
def function_named(contents: Contents) -> Iterator[Problem]:
    """A function must have a name, a system name or a file name."""
    for where, entry in contents.table("function_table"):
        if not (entry.name_strindex or entry.system_name_strindex or entry.filename_strindex):
            yield where, "has no name"


@rule
def line_numbers(contents: Contents) -> Iterator[Problem]:
    """Lines, columns and start lines must not be negative."""
    for where, entry in contents.table("function_table"):
        if entry.start_line < 0:
            yield f"{where}.start_line", f"is {entry.start_line}"
    for where, entry in contents.table("location_table"):
        for position, line in enumerate(entry.lines):
            if line.line < 0 or line.column < 0:
                yield f"{where}.lines[{position}]", f"is {line.line}:{line.column}"


@rule
def link_ids(contents: Contents) -> Iterator[Problem]:
    """A link must have a 16-byte trace id and an 8-byte span id, neither all zero."""
    for where, entry in contents.table("link_table"):
        for field, length in (("trace_id", 16), ("span_id", 8)):
            value = getattr(entry, field)
            if len(value) != length or not any(value):
                yield f"{where}.{field}", f"must be {length} bytes, not all zero"


@rule
def mapping_identity(contents: Contents) -> Iterator[Problem]:
    """A mapping must have a file id (htlhash). A build id must be in lower-case hexadecimal."""
    for where, entry in contents.table("mapping_table"):
        attributes = contents.attributes(entry.attribute_indices)
        file_id = attributes.get(names.BUILD_ID_HTLHASH)
        if file_id is None or not _HTLHASH.fullmatch(file_id.string_value):
            yield where, f"{names.BUILD_ID_HTLHASH} must be 32 hexadecimal digits"
        build_id = attributes.get(names.BUILD_ID_GNU)
        if build_id is not None and not _HEX.fullmatch(build_id.string_value):
            yield where, f"{names.BUILD_ID_GNU} must be hexadecimal"


@rule
def mapping_range(contents: Contents) -> Iterator[Problem]:
    """A mapping's start must lie before its limit, or both must be 0 (unknown)."""
    for where, entry in contents.table("mapping_table"):
        if entry.memory_limit <= entry.memory_start and (entry.memory_start or entry.memory_limit):
            yield where, f"[{entry.memory_start:#x}, {entry.memory_limit:#x}) is empty"


@rule
def location_in_mapping(contents: Contents) -> Iterator[Problem]:
    """A location's address must lie within the range of its mapping, if the range is known."""
    for where, entry in contents.table("location_table"):
        mapping = contents.entry("mapping_table", entry.mapping_index)
        if (
            not entry.mapping_index
            or mapping is None
            or mapping.memory_limit <= mapping.memory_start
        ):
            continue
        if not mapping.memory_start <= entry.address < mapping.memory_limit:
            yield f"{where}.address", f"{entry.address:#x} is outside its mapping"


@rule
def frame_type(contents: Contents) -> Iterator[Problem]:
    """Every location must have a profile.frame.type from the conventions."""
    for where, entry in contents.table("location_table"):
        value = contents.attributes(entry.attribute_indices).get(names.FRAME_TYPE)
        if value is None or value.string_value not in names.FRAME_TYPES:
            yield where, f"has no well-known {names.FRAME_TYPE}"


@rule
def kernel_mapping_name(contents: Contents) -> Iterator[Problem]:
    """A kernel mapping must be named vmlinux or after its module, without path or suffix."""
    kernel = {
        entry.mapping_index
        for _, entry in contents.table("location_table")
        if contents.is_kernel(entry)
    }
    for index, (where, entry) in enumerate(contents.table("mapping_table"), 1):
        name = contents.string(entry.filename_strindex)
        if index in kernel and (not name or "/" in name or ".ko" in name):
            yield where, f"{name!r} is not the name of a module"


@rule
def kernel_address(contents: Contents) -> Iterator[Problem]:
    """A kernel location without a mapping must have a runtime address."""
    for where, entry in contents.table("location_table"):
        if contents.is_kernel(entry) and not entry.mapping_index and entry.address < _KERNEL_HALF:
            yield where, f"{entry.address:#x} is not in the kernel half of the address space"


@rule
def kernel_names(contents: Contents) -> Iterator[Problem]:
    """Resolved names of kernel functions must be bare symbols, without +0x offset or [module]."""
    for where, entry in contents.table("location_table"):
        has_reason = names.UNRESOLVED in contents.attributes(entry.attribute_indices)
        for line in entry.lines if contents.is_kernel(entry) and not has_reason else ():
            function = contents.entry("function_table", line.function_index)
            name = contents.string(function.name_strindex) if function else ""
            if _OFFSET_OR_MODULE.search(name):
                yield where, f"{name!r} has an offset or a module after the symbol"
