"""Finds functions in kernel ELF files by RVA, and names them as in a running kernel."""

import struct
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

from otel_kprofiler.elf import is_mapping_symbol, marks_data
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import FileId, Line
from otel_kprofiler.symbols.kernel.build import END_TYPE, TableBuilder
from otel_kprofiler.symbols.kernel.elf_image import ElfImage, Section, find_debug_file, open_elf
from otel_kprofiler.symbols.kernel.identity import make_file_id
from otel_kprofiler.symbols.kernel.names import fold_preamble, make_line
from otel_kprofiler.symbols.kernel.table import SymbolTable

STT_NOTYPE, STT_FUNC = 0, 2
STB_LOCAL, STB_GLOBAL, STB_WEAK = 0, 1, 2

_LETTERS: Final = {STB_LOCAL: b"t", STB_GLOBAL: b"T", STB_WEAK: b"W"}
_LABEL: Final = b".L"
"""Prefix of assembler labels, which kallsyms also omits (scripts/mksysmap)."""
_ADDRESS_LIMIT = 1 << 63
_MAX_NAME_BYTES = 1 << 12  # a malformed string table may lack terminators


class ElfSymbol(NamedTuple):
    """A code symbol: RVA, size in bytes (0 if unknown), binding and name."""

    rva: int
    size: int
    binding: int
    name: bytes


class ElfMatch(NamedTuple):
    """The function at an RVA.

    Attributes:
        names: all names, the displayed name first.
        start: the RVA of the function's start.
        section_offset: offset of the RVA within ``section``, for disassemblers.
    """

    line: Line
    names: tuple[str, ...]
    start: int
    section: str
    section_offset: int


class ElfSymbols:
    """The functions in vmlinux or a module, by RVA.

    Args:
        path: the file, or its separate debug file. If the file has no symbols, the installed debug
            file with its build id is read instead.

    Raises:
        OSError: the file cannot be read.
        KProfilerError: the file is not an ELF file, has no symbols, or is a vmlinux with
            neither ``_text`` nor ``_stext``.
    """

    def __init__(self, path: str) -> None:
        image = open_elf(path)
        table = _find_symtab(image)
        debug = find_debug_file(image.build_id) if image.build_id and table is None else None
        if debug is not None:
            image = open_elf(debug)._replace(name=image.name)
            table = _find_symtab(image)
        if table is None:
            raise KProfilerError(
                f"{path} has no symbols", hint="use the file from the kernel's debug package"
            )
        self.name = image.name
        self.build_id = image.build_id
        self.file_id: FileId | None = make_file_id(image.build_id) if image.build_id else None
        self._bases = layout(image, table)
        self._sections = sorted(
            (base, image.sections[index]) for index, base in self._bases.items()
        )
        self.symbols = sorted(read_code_symbols(image, table, self._bases))
        self._table = self.table(0)

    def table(self, base: int) -> SymbolTable:
        """Returns the symbols by runtime address; ``base`` is the address of RVA 0."""
        # As in kallsyms, a label inside a function names the code that follows the label.
        rows = []
        for symbol in self.symbols:
            if not is_mapping_symbol(symbol.name):
                letter = _LETTERS.get(symbol.binding, b"t")
                rows.append((symbol.rva, letter, fold_preamble(symbol.name)))
            elif marks_data(symbol.name):
                rows.append((symbol.rva, bytes([END_TYPE]), b""))
        covered = 0
        for symbol, following in pairwise([*self.symbols, ElfSymbol(_ADDRESS_LIMIT, 0, 0, b"")]):
            covered = max(covered, symbol.rva + symbol.size)
            if symbol.rva < covered < following.rva:
                rows.append((covered, bytes([END_TYPE]), b""))
        rows.sort(key=lambda row: row[0])
        builder = TableBuilder()
        builder.add(
            [b"%016x" % (base + row[0]) for row in rows],
            b"".join(row[1] for row in rows),
            [row[2] for row in rows],
        )
        return builder.finish()

    def find(self, rva: int) -> ElfMatch | None:
        """Returns the function at an RVA; None in a gap or outside code."""
        at = bisect_right(self._sections, rva, key=lambda pair: pair[0]) - 1
        if at < 0 or rva >= self._sections[at][0] + self._sections[at][1].size:
            return None
        base, section = self._sections[at]
        # The extra byte makes the last function end where its symbol ends, not where the section
        # ends.
        symbol = self._table.lookup(rva, (base, base + section.size + 1))
        if symbol is None:
            return None
        name, start = symbol
        names = (other.decode("utf-8", "backslashreplace") for other in self._table.names_at(start))
        return ElfMatch(make_line(name), tuple(names), start, section.name, rva - base)


def layout(image: ElfImage, symtab: Section) -> dict[int, int]:
    """Returns the RVA of each code section, by section index.

    In vmlinux, the RVA is the offset from ``_text``, or from ``_stext`` if there is no ``_text``.
    In a module, the code sections except ``.init*`` start at 0 and follow one another, aligned, in
    section-header order, as the kernel lays them out (kernel/module/main.c, ``layout_sections``).
    """
    code = {index: s for index, s in enumerate(image.sections) if s.is_code}
    if not image.relocatable:
        marks = {
            name: value
            for name, _, _, value, _ in _entries(image, symtab)
            if name in (b"_text", b"_stext")
        }
        base = marks.get(b"_text", marks.get(b"_stext"))
        if base is None:
            raise KProfilerError(
                f"{image.path} is neither a module nor vmlinux: it lacks the _text symbol"
            )
        return {index: section.address - base for index, section in code.items()}
    bases, end = {}, 0
    for index, section in code.items():
        if not section.name.startswith(".init"):
            alignment = max(1, section.alignment)
            bases[index] = -(-end // alignment) * alignment
            end = bases[index] + section.size
    return bases


def read_code_symbols(
    image: ElfImage, symtab: Section, bases: dict[int, int]
) -> Iterator[ElfSymbol]:
    """Yields functions and labels in code sections, with RVAs, skipping malformed entries."""
    shift = {
        index: base - (0 if image.relocatable else image.sections[index].address)
        for index, base in bases.items()
    }
    for name, info, index, value, size in _entries(image, symtab):
        if index in shift and info & 0xF in (STT_NOTYPE, STT_FUNC):
            rva = value + shift[index]
            if name and 0 <= rva < _ADDRESS_LIMIT and not name.startswith(_LABEL):
                yield ElfSymbol(rva, min(size, _ADDRESS_LIMIT - rva - 1), info >> 4, name)


def _entries(image: ElfImage, symtab: Section) -> Iterator[tuple[bytes, int, int, int, int]]:
    """Yields the name, info, section, value and size of each entry (elf(5), Elf64_Sym)."""
    entry = struct.Struct(image.byte_order + "IBBHQQ")
    if symtab.link >= len(image.sections):
        raise KProfilerError(f"{image.path} has a symbol table without a string table")
    names = image.content(image.sections[symtab.link])
    data = image.content(symtab)
    for at, info, _, index, value, size in entry.iter_unpack(
        data[: len(data) // entry.size * entry.size]
    ):
        yield names[at : names.find(b"\0", at, at + _MAX_NAME_BYTES)], info, index, value, size


def _find_symtab(image: ElfImage) -> Section | None:
    return next((s for s in image.sections if s.name == ".symtab" and image.content(s)), None)
