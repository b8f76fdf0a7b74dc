"""Names PLT stubs after their targets, using the relocations of their GOT slots.

On x86-64, a stub is 8 or 16 bytes long: an optional ``endbr64`` and ``bnd``, and a jump through a
GOT slot. With indirect branch tracking, ``.plt`` contains stubs that push the index of their
relocation for the dynamic linker (System V ABI for x86-64, "Procedure Linkage Table"). On arm64, a
stub is 16 to 24 bytes long, with an optional ``bti c`` and pointer authentication (binutils,
elfnn-aarch64.c).
"""

import re
import struct
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from otel_kprofiler.elf import MACHINES, ElfFile, Section, Source, read_content
from otel_kprofiler.symbols.user.budget import ReadingBudget
from otel_kprofiler.symbols.user.symbol_tables import SymbolTable

MAX_STUB_BYTES: Final = 1 << 20
"""Size limit of a stub section. In libLLVM-14, the section is 8 KiB long."""
_MAX_NAME_BYTES: Final = 1024
_PART_BYTES: Final = 24 << 12  # bytes of relocations per read
_STUB_MEMORY: Final = 40
"""Memory used per byte of a stub section. Each stub requires two tuples of numbers and two keys."""
_NAME_FACTOR: Final = 3
"""Number of copies of a name: in its stub, among the names of all stubs, and in the table."""
_RELOCATION: Final = struct.Struct("<QIIq")  # slot, type, symbol, addend (Elf64_Rela)
_SYMBOL: Final = struct.Struct("<I20x")
_DYNAMIC: Final = struct.Struct("<qQ")
_SECTIONS: Final = (b".plt", b".plt.sec", b".plt.got", b".plt.bnd", b".iplt")
_DT_RELACOUNT: Final = 0x6FFFFFF9
_IRELATIVE: Final = (37, 1032)  # R_X86_64_IRELATIVE, R_AARCH64_IRELATIVE
_STUB_BYTES: Final = (8, 16)
_JUMP: Final = re.compile(rb"(?:\xf3\x0f\x1e\xfa)?\xf2?\xff\x25(?P<distance>....)", re.DOTALL)
# adrp x16, PAGE; ldr x17, [x16, OFFSET]; add x16, x16, OFFSET; autia1716; br x17
_A64_STUB: Final = re.compile(
    rb"(?:\x5f\x24\x03\xd5)?(?P<page>[\x10\x30\x50\x70\x90\xb0\xd0\xf0]..[\x90\xb0\xd0\xf0])"
    rb"(?P<load>\x11.[\x40-\x7f]\xf9)\x10..\x91(?:\x9f\x21\x03\xd5)?\x20\x02\x1f\xd6",
    re.DOTALL,
)
_A64_WORD_BYTES: Final = 4
_A64_PAGE_BYTES: Final = 4096  # adrp's unit, regardless of the kernel's page size
_PUSH: Final = re.compile(rb"\xf3\x0f\x1e\xfa\x68(?P<index>....)\xf2?\xe9", re.DOTALL)


class Stub(NamedTuple):
    """A stub at the SVMAs ``[start, start + size)``.

    Attributes:
        name: name of the stub's target; empty if unknown.
        resolver: SVMA of the target's resolver if the target is an STT_GNU_IFUNC; otherwise 0.
    """

    start: int
    size: int
    name: bytes
    resolver: int


class _Found(NamedTuple):
    start: int
    size: int
    slot: int | None
    row: int


def read_stubs(
    source: Source,
    elf: ElfFile,
    sections: list[Section],
    symbols: SymbolTable | None,
    limit: int,
    *,
    budget: ReadingBudget,
) -> list[Stub]:
    """Reads a file's PLT stubs; empty for machines other than x86-64 and arm64.

    ``symbols`` is ``.dynsym``, which the relocations reference. Raises ``ElfError`` if a section is
    malformed, has more than ``limit`` bytes, or exceeds the memory budget.
    """
    find = _FINDERS.get(elf.machine)
    if find is None:
        return []
    by_name = {section_of_name.name: section_of_name for section_of_name in reversed(sections)}
    by_slot: dict[int, _Found] = {}
    by_row: dict[int, _Found] = {}
    for section in filter(None, map(by_name.get, _SECTIONS)):
        most = min(limit, MAX_STUB_BYTES)
        budget.take(_STUB_MEMORY * min(section.size, most), "its PLT")
        for match in find(read_content(source, section, most), section):
            if match.slot is not None:
                by_slot[match.slot] = match
            else:
                by_row[match.row] = match
    stubs: list[Stub] = []
    if table := by_name.get(b".rela.plt"):
        for row, relocation in _relocations(source, table, 0, by_slot, by_row):
            for stub in (by_slot.pop(relocation[0], None), by_row.pop(row, None)):
                stubs += _name(stub, relocation, symbols, budget) if stub else ()
    if table := by_name.get(b".rela.dyn"):
        relative = _relative_count(source, by_name.get(b".dynamic"), limit)
        for _, relocation in _relocations(source, table, relative, by_slot, {}):
            stubs += _name(by_slot.pop(relocation[0]), relocation, symbols, budget)
    return stubs


def _relocations(
    source: Source, section: Section, skipped: int, slots: Collection[int], rows: Collection[int]
) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """Yields the index and fields of each relocation in ``rows`` or with its slot in ``slots``."""
    for at in range(skipped * _RELOCATION.size, section.size, _PART_BYTES):
        if not slots and not rows:
            return
        size = min(_PART_BYTES, section.size - at) // _RELOCATION.size * _RELOCATION.size
        content = source.read(section.offset + at, size)
        first = at // _RELOCATION.size
        for index, slot in enumerate(memoryview(content).cast("Q")[::3].tolist()):
            if slot in slots or first + index in rows:
                yield first + index, _RELOCATION.unpack_from(content, index * _RELOCATION.size)


def _name(
    stub: _Found,
    relocation: tuple[int, int, int, int],
    symbols: SymbolTable | None,
    budget: ReadingBudget,
) -> Iterator[Stub]:
    _, kind, symbol, addend = relocation
    if kind in _IRELATIVE:
        yield Stub(stub.start, stub.size, b"", addend)
    elif symbols and 0 < symbol < len(symbols.content) // _SYMBOL.size:
        (at,) = _SYMBOL.unpack_from(symbols.content, symbol * _SYMBOL.size)
        end = symbols.names.find(0, at, at + _MAX_NAME_BYTES)
        if end > at:
            budget.take(_NAME_FACTOR * (end - at), "names of its PLT")
            yield Stub(stub.start, stub.size, symbols.names[at:end], 0)


def _find_x86(content: bytes, section: Section) -> Iterator[_Found]:
    size = section.entry_size if section.entry_size in _STUB_BYTES else max(_STUB_BYTES)
    for at in range(0, len(content), size):
        start = section.address + at
        if jump := _JUMP.match(content, at):
            distance = int.from_bytes(jump["distance"], "little", signed=True)
            yield _Found(start, size, section.address + jump.end() + distance, 0)
        elif push := _PUSH.match(content, at):
            yield _Found(start, size, None, int.from_bytes(push["index"], "little"))


def _find_a64(content: bytes, section: Section) -> Iterator[_Found]:
    for stub in _A64_STUB.finditer(content):
        at = stub.start("page")
        if at % _A64_WORD_BYTES:
            continue
        page, load = (int.from_bytes(stub[name], "little") for name in ("page", "load"))
        pages = (page >> 5 & 0x7FFFF) << 2 | page >> 29 & 3
        pages -= (pages & 1 << 20) << 1  # sign-extends the 21-bit number
        slot = (section.address + at) // _A64_PAGE_BYTES * _A64_PAGE_BYTES + pages * _A64_PAGE_BYTES
        slot += (load >> 10 & 0xFFF) * 8
        yield _Found(section.address + stub.start(), len(stub[0]), slot, 0)


_FINDERS: Final = {MACHINES["x86_64"]: _find_x86, MACHINES["aarch64"]: _find_a64}


def _relative_count(source: Source, dynamic: Section | None, limit: int) -> int:
    """Returns the number of relative relocations, which come first in the table."""
    content = read_content(source, dynamic, limit) if dynamic else b""
    rows = _DYNAMIC.iter_unpack(content[: len(content) // _DYNAMIC.size * _DYNAMIC.size])
    return next((value for tag, value in rows if tag == _DT_RELACOUNT), 0)
