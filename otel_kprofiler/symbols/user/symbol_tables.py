"""Decodes ``.symtab`` and ``.dynsym`` in user-space binaries, a column at a time.

An entry has 24 bytes (elf(5), Elf64_Sym): the name, a word with type, binding and section index,
the value, and the size. Slicing columns with ``memoryview`` is fast enough for hundreds of
thousands of entries without a native library.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection
from heapq import merge
from itertools import compress
from operator import itemgetter
from typing import Final, NamedTuple

from otel_kprofiler.elf import ElfError, ElfProblem, Section, Source, cut_versions
from otel_kprofiler.symbols.user.budget import ReadingBudget

STT_NOTYPE, STT_FUNC, STT_GNU_IFUNC = 0, 2, 10
STB_LOCAL, STB_GLOBAL, STB_WEAK = 0, 1, 2
SHT_SYMTAB, SHT_DYNSYM = 2, 11
SHF_EXECINSTR: Final = 4
ENTRY_BYTES: Final = 24
MAX_TABLE_BYTES: Final = 32 << 20
"""Size limit for a symbol table, enough for 1.4 million symbols."""
COLUMN_BYTES: Final = 21
"""Memory used by a symbol in :class:`Symbols`, in bytes, excluding the name."""
_RUN: Final = 1 << 14  # symbols per sorted run
_SORT_BYTES: Final = 96
"""Memory used per symbol while a run is sorted."""
_PICKED: Final = 1 << 12
_PART_ENTRIES: Final = 1 << 12
_PICK_BYTES: Final = 192
"""Memory, in bytes, used per entry while a chunk of the table is filtered."""
_NAMES_PART_BYTES: Final = 1 << 16
_CODE_TYPES: Final = (STT_NOTYPE, STT_FUNC, STT_GNU_IFUNC)
_CODE_KINDS: Final = frozenset(kind for kind in range(256) if kind & 0xF in _CODE_TYPES)
_KIND_AT, _SECTION_AT = 4, 6


class SymbolTable(NamedTuple):
    """A raw symbol table; ``code`` contains the indices of sections with code."""

    content: bytes
    names: bytes
    code: frozenset[int]


class Symbols(NamedTuple):
    """Columns of code symbols, in symbol-table order.

    Attributes:
        values: SVMA of each symbol.
        sizes: size of each symbol in bytes; 0 if unknown.
        kinds: values of ``st_info``, with the type in the lower four bits and the binding above.
        names_at: offset of each name in ``names``; a zero byte terminates the name.
    """

    values: array[int]
    sizes: array[int]
    kinds: bytes
    names_at: array[int]
    names: bytes | bytearray


def read_table(
    source: Source, sections: list[Section], kind: int, limit: int, budget: ReadingBudget
) -> SymbolTable | None:
    """Reads a symbol table with its names; None if the table is missing or empty.

    ``kind`` is ``SHT_SYMTAB`` or ``SHT_DYNSYM``. Raises ``ElfError`` if the table is malformed, or
    if the table or its names exceed ``limit`` bytes.
    """
    table = next((section for section in sections if section.kind == kind), None)
    content = (
        budget.read_content(source, table, min(limit, MAX_TABLE_BYTES))
        if table is not None
        else b""
    )
    if table is None or not content:
        return None
    if len(content) % ENTRY_BYTES or table.link >= len(sections):
        raise ElfError(
            ElfProblem.DAMAGED_SECTION,
            f"the symbol table has {len(content)} bytes and links to section {table.link} of "
            f"{len(sections)}",
        )
    names = budget.read_content(source, sections[table.link], limit)
    code = frozenset(
        index for index, section in enumerate(sections) if section.flags & SHF_EXECINSTR
    )
    return SymbolTable(content, names, code)


def parse_symbols(table: SymbolTable, budget: ReadingBudget | None = None) -> Symbols:
    """Parses the symbols that may name code, and strips their versions (``@GLIBC_2.34``).

    Keeps the whole string table, because selecting names would require more copying. Raises
    ``ElfError`` if the symbols exceed the budget.
    """
    content, names, code = table
    budget = budget or ReadingBudget()
    count = len(content) // ENTRY_BYTES
    most = COLUMN_BYTES * count
    values, sizes, names_at, kinds = array("Q"), array("Q"), array("I"), bytearray()
    budget.take(most, "its symbols")
    with budget.hold(_PICK_BYTES * min(count, _PART_ENTRIES), "its symbols"):
        for at in range(0, len(content), _PART_ENTRIES * ENTRY_BYTES):
            part = content[at : at + _PART_ENTRIES * ENTRY_BYTES]
            words, longs = memoryview(part).cast("I"), memoryview(part).cast("Q")
            picked = _pick_code(part, code)
            values.extend(compress(longs[1::3].tolist(), picked))
            sizes.extend(compress(longs[2::3].tolist(), picked))
            names_at.extend(compress(words[0::6].tolist(), picked))
            kinds += bytes(compress(part[_KIND_AT::ENTRY_BYTES], picked))
        plain = _cut_versions(names, budget)
    budget.give_back(most - COLUMN_BYTES * len(values))
    return Symbols(values, sizes, bytes(kinds), names_at, plain)


def _cut_versions(names: bytes, budget: ReadingBudget) -> bytes | bytearray:
    if b"@" not in names:
        return names
    budget.take(len(names), "its names")
    plain = bytearray()
    at = 0
    while at < len(names):
        end = names.find(b"\0", at + _NAMES_PART_BYTES) + 1 or len(names)
        plain += cut_versions(names[at:end])
        at = end
    return plain


def _pick_code(content: bytes, code: frozenset[int]) -> bytes:
    """Returns a byte for each entry: 1 if the entry may name code, else 0.

    Translates each column of bytes, then combines the columns as large integers.
    """
    kinds = content[_KIND_AT::ENTRY_BYTES]
    low, high = content[_SECTION_AT::ENTRY_BYTES], content[_SECTION_AT + 1 :: ENTRY_BYTES]
    by_high = defaultdict(set)
    for index in code:
        by_high[index >> 8].add(index & 0xFF)
    picked = 0
    for part, indices in by_high.items():
        picked |= _one_of(low, indices) & _one_of(high, {part})
    return (picked & _one_of(kinds, _CODE_KINDS)).to_bytes(len(kinds), "little")


def _one_of(column: bytes, wanted: Collection[int]) -> int:
    """Returns an integer whose bytes are 1 where the column's value is in ``wanted``, else 0."""
    flags = bytearray(256)
    for value in wanted:
        flags[value] = 1
    return int.from_bytes(column.translate(flags), "little")


def sort_bytes(count: int) -> int:
    """Returns the memory used to sort ``count`` symbols, excluding the result."""
    return _SORT_BYTES * min(count, _RUN)


def sort_symbols(values: array[int]) -> array[int]:
    """Returns the symbols' indices, sorted by value. Sorts and merges runs, to save memory."""
    count = len(values)
    # A list holds an int object for each value, so it is used only for a single run.
    get = (values.tolist() if count <= _RUN else values).__getitem__
    runs = [
        array("I", sorted(range(at, min(at + _RUN, count)), key=get))
        for at in range(0, count, _RUN)
    ]
    return runs[0] if len(runs) == 1 else array("I", merge(*runs, key=get))


def pick(order: array[int], column: array[int]) -> array[int]:
    """Returns the values of a column in the given order."""
    picked = array(column.typecode, [0]) * len(order)
    for at in range(0, len(order), _PICKED):  # in chunks that fit in the CPU cache
        part = order[at : at + _PICKED]
        # With a single index, an itemgetter would not return a tuple.
        values = itemgetter(*part, part[0])(column)
        picked[at : at + len(part)] = array(column.typecode, values[:-1])
    return picked
