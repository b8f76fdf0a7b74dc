"""Decodes ``.symtab`` and ``.dynsym`` of user files, a column at a time.

An entry has 24 bytes (elf(5), Elf64_Sym): name, and a word of type, binding and section index;
value; size. Columns of integers are sliced by ``memoryview`` and filtered by ``itertools``, which
is what makes hundreds of thousands of entries affordable without a library.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import compress
from typing import Final, NamedTuple

from otel_kprofiler.elf import (
    ElfError,
    ElfProblem,
    Section,
    Source,
    cut_versions,
    read_content,
)

STT_NOTYPE, STT_FUNC, STT_GNU_IFUNC = 0, 2, 10
STB_LOCAL, STB_GLOBAL, STB_WEAK = 0, 1, 2
SHT_SYMTAB, SHT_DYNSYM = 2, 11
SHF_EXECINSTR: Final = 4
ENTRY_BYTES: Final = 24
_CODE_TYPES: Final = (STT_NOTYPE, STT_FUNC, STT_GNU_IFUNC)
_CODE_KINDS: Final = frozenset(kind for kind in range(256) if kind & 0xF in _CODE_TYPES)
_KIND_AT, _SECTION_AT = 4, 6


class SymbolTable(NamedTuple):
    """A symbol table as it is in a file.

    Attributes:
        content: entries.
        names: names, each with a zero behind it.
        code: indices of sections with code.
    """

    content: bytes
    names: bytes
    code: frozenset[int]


class Symbols(NamedTuple):
    """Columns of code symbols, in the order of their table.

    Attributes:
        values: SVMA.
        sizes: in bytes; 0 if unknown.
        kinds: ``st_info``: type in the lower four bits, binding above.
        names_at: where each name begins in ``names``.
        names: names, each with a zero behind it.
    """

    values: list[int]
    sizes: list[int]
    kinds: list[int]
    names_at: list[int]
    names: bytes


def read_table(
    source: Source, sections: list[Section], kind: int, limit: int, names_limit: int
) -> SymbolTable | None:
    """A symbol table with its names; None if the file has none, or an empty one.

    Args:
        source: the file.
        sections: its sections.
        kind: ``SHT_SYMTAB`` or ``SHT_DYNSYM``.
        limit: size of the table in bytes.
        names_limit: size of its names in bytes.

    Raises:
        ElfError: the table is damaged or too large.
    """
    table = next((one for one in sections if one.kind == kind), None)
    content = read_content(source, table, limit) if table is not None else b""
    if table is None or not content:
        return None
    if len(content) % ENTRY_BYTES or table.link >= len(sections):
        raise ElfError(ElfProblem.DAMAGED_SECTION, f"a symbol table of {len(content)} bytes")
    names = read_content(source, sections[table.link], names_limit)
    code = frozenset(index for index, one in enumerate(sections) if one.flags & SHF_EXECINSTR)
    return SymbolTable(content, names, code)


def parse_symbols(table: SymbolTable) -> Symbols:
    """The symbols that may name code.

    The names are those of the table as a whole: fewer bytes are copied, and more kept, than if
    they were picked. Versions are cut off.
    """
    content, names, code = table
    words, longs = memoryview(content).cast("I"), memoryview(content).cast("Q")
    picked = _pick_code(content, code)
    return Symbols(
        list(compress(longs[1::3].tolist(), picked)),
        list(compress(longs[2::3].tolist(), picked)),
        list(compress(content[_KIND_AT::ENTRY_BYTES], picked)),
        list(compress(words[0::6].tolist(), picked)),
        cut_versions(names),
    )


def _pick_code(content: bytes, code: frozenset[int]) -> bytes:
    """For each entry 1 if it may name code, else 0.

    A column of bytes is translated, and combined with others as one large number, at once.
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
    """A number with a byte for each of a column, 1 if it is one of those."""
    flags = bytearray(256)
    for value in wanted:
        flags[value] = 1
    return int.from_bytes(column.translate(flags), "little")
