"""Finds a few symbols in an ELF file by name, without parsing the entire symbol table."""

from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from otel_kprofiler.elf.content import read_content
from otel_kprofiler.elf.headers import Section
from otel_kprofiler.elf.problem import ElfError, ElfProblem
from otel_kprofiler.elf.source import Source

_SHT_SYMTAB, _SHT_DYNSYM = 2, 11
_ENTRY_BYTES: Final = 24  # Elf64_Sym, elf(5)
_WORDS, _LONGS = _ENTRY_BYTES // 4, _ENTRY_BYTES // 8
_MAX_TABLE_BYTES: Final = 32 << 20


class ElfSymbol(NamedTuple):
    """The SVMA of a symbol, and its size in bytes (0 if unknown)."""

    address: int
    size: int


def find_symbols(
    source: Source, sections: list[Section], names: Collection[bytes]
) -> dict[bytes, ElfSymbol]:
    """Returns defined symbols by name, from ``.dynsym`` or, if none match, ``.symtab``.

    Raises ``ElfError`` if a symbol table is malformed or too large.
    """
    for kind in (_SHT_DYNSYM, _SHT_SYMTAB):
        for table in (section for section in sections if section.kind == kind):
            if symbols := dict(_find_in(source, sections, table, names)):
                return symbols
    return {}


def _find_in(
    source: Source, sections: list[Section], table: Section, names: Collection[bytes]
) -> Iterator[tuple[bytes, ElfSymbol]]:
    content = read_content(source, table, _MAX_TABLE_BYTES)
    if len(content) % _ENTRY_BYTES or table.link >= len(sections):
        detail = (
            f"the symbol table has {len(content)} bytes and links to section {table.link} of "
            f"{len(sections)}"
        )
        raise ElfError(ElfProblem.DAMAGED_SECTION, detail)
    texts = read_content(source, sections[table.link], _MAX_TABLE_BYTES)
    words, longs = memoryview(content).cast("I"), memoryview(content).cast("Q")
    wanted = {at: name for name in names for at in _places(texts, name)}
    for index, at in enumerate(words[::_WORDS]):
        is_defined = words[index * _WORDS + 1] >> 16
        if at in wanted and is_defined:
            yield wanted[at], ElfSymbol(*longs[index * _LONGS + 1 : index * _LONGS + 3])


def _places(texts: bytes, name: bytes) -> Iterator[int]:
    """Yields each offset of a name in a string table, also as the tail of a longer name."""
    at = texts.find(name + b"\0")
    while at >= 0:
        yield at
        at = texts.find(name + b"\0", at + 1)
