"""ELF headers, as far as unwinding and naming a file's code need them.

Reads the header, the program headers and the notes: some hundred bytes per file. pyelftools, which
reads kernel files elsewhere, parses more than a storm of new binaries leaves time for.
"""

from __future__ import annotations

import platform
import struct
from itertools import pairwise
from typing import Final, NamedTuple

from otel_kprofiler.model import BuildId, Segment
from otel_kprofiler.symbols import find_build_id
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused
from otel_kprofiler.unwinding.source import Source

# elf(5), /usr/include/elf.h
_IDENT: Final = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
_HEADER: Final = struct.Struct("<16xHHIQQQIHHHHHH")
_PROGRAM_HEADER: Final = struct.Struct("<IIQQQQQQ")
_SECTION_HEADER: Final = struct.Struct("<IIQQQQIIQQ")
_EXECUTABLE_TYPES: Final = (2, 3)  # ET_EXEC, ET_DYN
MACHINES: Final = {"x86_64": 62, "aarch64": 183}
"""``e_machine`` by what uname(2) calls the machine."""
_PT_LOAD, _PT_NOTE, _PT_GNU_EH_FRAME = 1, 4, 0x6474E550
_PF_X: Final = 1
_SHT_NOBITS: Final = 8
_SHF_COMPRESSED: Final = 0x800
_ADDRESS_LIMIT: Final = 1 << 47

MAX_PROGRAM_HEADERS: Final = 512
MAX_SECTIONS: Final = 4096
MAX_NOTE_BYTES: Final = 64 * 1024
MAX_NAMES_BYTES: Final = 1 << 20


class ElfFile(NamedTuple):
    """What the program headers say.

    Attributes:
        loads: all PT_LOAD segments that have bytes in the file, by address.
        texts: the executable ones.
        search: address of ``.eh_frame_hdr`` and its size; None if the file has none.
        build_id: GNU build id; None if the file has none.
        entry: address of the first instruction; 0 if the file has none.
        section_headers: offset, number, and index of the one with their names.
    """

    loads: tuple[Segment, ...]
    texts: tuple[Segment, ...]
    search: tuple[int, int] | None
    build_id: BuildId | None
    entry: int
    section_headers: tuple[int, int, int]


def read_elf(source: Source, machine: str = platform.machine()) -> ElfFile:
    """Read the headers and the build id.

    Raises:
        TableRefused: not an ELF file for code of ``machine``, or the headers are damaged.
    """
    if source.size < _HEADER.size or source.read(0, len(_IDENT)) != _IDENT:
        raise TableRefused(Refusal.NOT_ELF)
    header = _HEADER.unpack(source.read(0, _HEADER.size))
    kind, code, _, entry, at, sections = header[:6]
    program_bytes, count, section_bytes, section_count, names = header[8:]
    if kind not in _EXECUTABLE_TYPES or code != MACHINES.get(machine):
        raise TableRefused(Refusal.NOT_ELF, f"type {kind}, machine {code}")
    if program_bytes != _PROGRAM_HEADER.size or count > MAX_PROGRAM_HEADERS:
        raise TableRefused(Refusal.DAMAGED_HEADERS, f"{count} program headers")
    headers = list(_PROGRAM_HEADER.iter_unpack(source.read(at, count * program_bytes)))
    if section_bytes != _SECTION_HEADER.size:
        section_count = 0
    loads, texts, search = _segments(headers, source.size)
    notes = [(offset, size) for kind, _, offset, _, _, size, _, _ in headers if kind == _PT_NOTE]
    build_id = _find_build_id(source, notes)
    return ElfFile(loads, texts, search, build_id, entry, (sections, section_count, names))


def find_offset(loads: tuple[Segment, ...], address: int, size: int) -> int:
    """Offset in the file of what is loaded at an address.

    Raises:
        TableRefused: no segment has all of these bytes.
    """
    for load in loads:
        if load.address <= address and address + size <= load.address + load.size:
            return load.offset + address - load.address
    raise TableRefused(Refusal.OUT_OF_BOUNDS, f"{size} bytes at {address:#x} are not loaded")


def find_section(source: Source, elf: ElfFile, name: bytes) -> Segment:
    """A section by its name, for files whose program headers do not point to it.

    Raises:
        TableRefused: there is none, it is compressed or not in the file, or the section headers
            are damaged.
    """
    start, count, names_index = elf.section_headers
    if count > MAX_SECTIONS:
        raise TableRefused(Refusal.DAMAGED_HEADERS, f"{count} sections")
    if not names_index < count:
        raise TableRefused(Refusal.NO_FRAMES, "no section headers")
    rows = list(_SECTION_HEADER.iter_unpack(source.read(start, count * _SECTION_HEADER.size)))
    names_at, names_size = rows[names_index][4:6]
    if names_size > MAX_NAMES_BYTES:
        raise TableRefused(Refusal.DAMAGED_HEADERS, f"section names of {names_size} bytes")
    names = source.read(names_at, names_size)
    for at, kind, flags, address, offset, size, *_ in rows:
        if names[at : at + len(name) + 1] == name + b"\0":
            if kind == _SHT_NOBITS or flags & _SHF_COMPRESSED:
                raise TableRefused(Refusal.COMPRESSED, name.decode())
            return Segment(offset, size, address)
    raise TableRefused(Refusal.NO_FRAMES)


def _segments(
    headers: list[tuple[int, ...]], file_size: int
) -> tuple[tuple[Segment, ...], tuple[Segment, ...], tuple[int, int] | None]:
    loads, texts, search = [], [], None
    for kind, flags, offset, address, _, size, _, _ in headers:
        if kind == _PT_GNU_EH_FRAME:
            search = address, size
        if kind != _PT_LOAD or not size:
            continue
        if offset + size > file_size or address + size > _ADDRESS_LIMIT:
            raise TableRefused(Refusal.DAMAGED_HEADERS, "a segment exceeds the file")
        segment = Segment(offset, size, address)
        loads.append(segment)
        if flags & _PF_X:
            texts.append(segment)
    by_address = sorted(loads, key=lambda load: load.address)
    for low, high in pairwise(by_address):
        if low.address + low.size > high.address:
            raise TableRefused(Refusal.DAMAGED_HEADERS, "segments overlap")
    return tuple(by_address), tuple(sorted(texts, key=lambda text: text.address)), search


def _find_build_id(source: Source, notes: list[tuple[int, int]]) -> BuildId | None:
    """The build id; None if there is none, or the notes are damaged."""
    left = MAX_NOTE_BYTES
    for offset, size in notes:
        left -= size
        if left < 0 or offset + size > source.size:
            return None
        if found := find_build_id(source.read(offset, size)):
            return found
    return None
