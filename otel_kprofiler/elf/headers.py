"""Reads the ELF headers that unwinding and symbolization need.

Reads only a few hundred bytes of each file. pyelftools, which is used for kernel files, is too
slow when many new programs start at the same time.
"""

import contextlib
import platform
import struct
from collections.abc import Iterable
from itertools import pairwise
from typing import Final, NamedTuple

from otel_kprofiler.elf.notes import find_build_id
from otel_kprofiler.elf.problem import ElfError, ElfProblem
from otel_kprofiler.elf.source import Source
from otel_kprofiler.model import BuildId, Segment

# elf(5), /usr/include/elf.h
IDENT: Final = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
HEADER: Final = struct.Struct("<16xHHIQQQIHHHHHH")
PROGRAM_HEADER: Final = struct.Struct("<IIQQQQQQ")
_SECTION_HEADER: Final = struct.Struct("<IIQQQQIIQQ")
_EXECUTABLE_TYPES: Final = (2, 3)  # ET_EXEC, ET_DYN
MACHINES: Final = {"x86_64": 62, "aarch64": 183}
"""Values of ``e_machine``, keyed by machine name as in uname(2)."""
_PT_LOAD, _PT_INTERP, _PT_NOTE, _PT_GNU_EH_FRAME = 1, 3, 4, 0x6474E550
_PF_X: Final = 1
_GO_NOTE: Final = b"\4\0\0\0Go\0\0"  # type and owner of Go's build id
_SHT_NOTE: Final = 7
SHT_NOBITS: Final = 8
SHF_COMPRESSED: Final = 0x800
_ADDRESS_LIMIT: Final = 1 << 47

MAX_PROGRAM_HEADERS: Final = 512
MAX_SECTIONS: Final = 4096
MAX_NOTE_BYTES: Final = 64 * 1024
MAX_NAMES_BYTES: Final = 1 << 20
MAX_NAME_BYTES: Final = 256
MAX_PATH_BYTES: Final = 4096  # PATH_MAX


class Section(NamedTuple):
    """A section header. The fields are in the order of elf(5).

    ``address`` is 0 if the section is not loaded, ``entry_size`` if it has no fixed-size entries.
    """

    name: bytes
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class ElfFile(NamedTuple):
    """Contents of an ELF file's header, program headers and notes.

    Attributes:
        loads: all PT_LOAD segments with bytes in the file, sorted by address.
        texts: the executable segments among ``loads``.
        search: address and size of ``.eh_frame_hdr``; None if the file has none.
        build_id: GNU build id; None if the file has none.
        entry: SVMA of the entry point; 0 if the file has none.
        section_headers: offset and number of the section headers, and index of the section name
            table.
        machine: ``e_machine``.
        is_go: whether Go's linker produced all or part of the file.
    """

    loads: tuple[Segment, ...]
    texts: tuple[Segment, ...]
    search: tuple[int, int] | None
    build_id: BuildId | None
    entry: int
    section_headers: tuple[int, int, int]
    machine: int
    is_go: bool = False


def read_elf(source: Source, machine: str | None = platform.machine()) -> ElfFile:
    """Reads the ELF header, the program headers and the build id of a file.

    ``machine`` is a name as in uname(2); None allows any of ``MACHINES``. Raises ``ElfError`` if
    the headers are malformed, or if the file is not an ELF file for this machine.
    """
    code, entry, at, count, section_headers = _read_header(source, machine)
    headers = list(PROGRAM_HEADER.iter_unpack(source.read(at, count * PROGRAM_HEADER.size)))
    loads, texts, search = _segments(headers, source.size)
    notes = [(offset, size) for kind, _, offset, _, _, size, _, _ in headers if kind == _PT_NOTE]
    build_id, is_go = _read_notes(source, notes)
    elf = ElfFile(loads, texts, search, build_id, entry, section_headers, code, is_go)
    if is_go and build_id is None:  # PT_NOTE of Go's linker contains only Go's note
        with contextlib.suppress(ElfError):
            return elf._replace(build_id=_read_note_sections(source, elf)[0])
    return elf


def read_debug_elf(source: Source) -> ElfFile:
    """Reads a debug file's headers, but not its segments, whose bytes are not in the file.

    Raises the same exceptions as :func:`read_elf`.
    """
    code, entry, _, _, section_headers = _read_header(source, None)
    elf = ElfFile((), (), None, None, entry, section_headers, code)
    build_id, is_go = _read_note_sections(source, elf)
    return elf._replace(build_id=build_id, is_go=is_go)


def read_load_addresses(source: Source) -> list[tuple[int, int]]:
    """Returns the start and end (SVMA) of each PT_LOAD segment, in file order.

    The segments of debug files are included, although they occupy no bytes in the file. Raises
    ``ElfError`` if the headers are malformed.
    """
    _, _, at, count, _ = _read_header(source, None)
    headers = PROGRAM_HEADER.iter_unpack(source.read(at, count * PROGRAM_HEADER.size))
    return [(row[3], row[3] + row[6]) for row in headers if row[0] == _PT_LOAD]


def read_dynamic_linker(source: Source) -> bytes:
    """Returns the dynamic linker's path; empty if the file has none.

    Raises ``ElfError`` if the headers are malformed.
    """
    _, _, at, count, _ = _read_header(source, None)
    headers = PROGRAM_HEADER.iter_unpack(source.read(at, count * PROGRAM_HEADER.size))
    places = ((offset, size) for kind, _, offset, _, _, size, _, _ in headers if kind == _PT_INTERP)
    offset, size = next(places, (0, 0))
    if size > MAX_PATH_BYTES:
        raise ElfError(ElfProblem.DAMAGED_HEADERS, f"a PT_INTERP path of {size} bytes is too long")
    return source.read(offset, size).rstrip(b"\0")


def find_offset(loads: tuple[Segment, ...], address: int, size: int) -> int:
    """Returns the file offset of the bytes loaded at an address.

    Raises ``ElfError`` if no segment contains all of the bytes.
    """
    for load in loads:
        if load.address <= address and address + size <= load.address + load.size:
            return load.offset + address - load.address
    raise ElfError(
        ElfProblem.OUT_OF_BOUNDS, f"{size} bytes at {address:#x} are outside the PT_LOAD segments"
    )


def find_address(segments: Iterable[Segment], offset: int) -> int | None:
    """Returns the SVMA of the byte at a file offset; None if no segment contains the byte.

    Segments that share a page overlap in the file, so pass only segments that may contain the byte,
    such as ``ElfFile.texts`` for code.
    """
    for offset_of, size, address in segments:
        if 0 <= offset - offset_of < size:
            return address + offset - offset_of
    return None


def read_sections(source: Source, elf: ElfFile) -> list[Section]:
    """Returns all section headers, in file order; empty if the sections have no names.

    Raises ``ElfError`` if the section headers are malformed.
    """
    start, count, names_index = elf.section_headers
    if count > MAX_SECTIONS:
        raise ElfError(ElfProblem.DAMAGED_HEADERS, f"{count} sections")
    if not names_index < count:
        return []
    rows = list(_SECTION_HEADER.iter_unpack(source.read(start, count * _SECTION_HEADER.size)))
    names_at, names_size = rows[names_index][4:6]
    if names_size > MAX_NAMES_BYTES:
        raise ElfError(ElfProblem.DAMAGED_HEADERS, f"too many section names: {names_size} bytes")
    names = source.read(names_at, names_size)
    return [Section(_name(names, row[0]), *row[1:]) for row in rows]


def find_section(source: Source, elf: ElfFile, name: bytes) -> Segment:
    """Returns the location of the section with this name, even if no program header covers it.

    Raises ``ElfError`` if the section is missing, compressed or not in the file, or if the section
    headers are malformed.
    """
    for section in read_sections(source, elf):
        if section.name == name:
            if section.kind == SHT_NOBITS or section.flags & SHF_COMPRESSED:
                raise ElfError(ElfProblem.NOT_IN_FILE, name.decode())
            return Segment(section.offset, section.size, section.address)
    raise ElfError(ElfProblem.NO_SECTION, name.decode())


def _read_header(
    source: Source, machine: str | None
) -> tuple[int, int, int, int, tuple[int, int, int]]:
    """Returns the machine, the entry point, and the locations of program and section headers."""
    if source.size < HEADER.size or source.read(0, len(IDENT)) != IDENT:
        raise ElfError(ElfProblem.NOT_ELF)
    header = HEADER.unpack(source.read(0, HEADER.size))
    kind, code, _, entry, at, sections = header[:6]
    program_bytes, count, section_bytes, section_count, names = header[8:]
    machines = MACHINES.values() if machine is None else [MACHINES.get(machine)]
    if kind not in _EXECUTABLE_TYPES or code not in machines:
        raise ElfError(ElfProblem.NOT_ELF, f"unsupported e_type {kind} or e_machine {code}")
    if (count and program_bytes != PROGRAM_HEADER.size) or count > MAX_PROGRAM_HEADERS:
        raise ElfError(ElfProblem.DAMAGED_HEADERS, f"{count} program headers")
    if section_bytes != _SECTION_HEADER.size:
        section_count = 0
    return code, entry, at, count, (sections, section_count, names)


def _name(names: bytes, at: int) -> bytes:
    return names[at : at + MAX_NAME_BYTES].partition(b"\0")[0]


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
            raise ElfError(ElfProblem.DAMAGED_HEADERS, "a segment extends beyond the file")
        segment = Segment(offset, size, address)
        loads.append(segment)
        if flags & _PF_X:
            texts.append(segment)
    by_address = sorted(loads, key=lambda load: load.address)
    for low, high in pairwise(by_address):
        if low.address + low.size > high.address:
            raise ElfError(ElfProblem.DAMAGED_HEADERS, "segments overlap")
    return tuple(by_address), tuple(sorted(texts, key=lambda text: text.address)), search


def _read_note_sections(source: Source, elf: ElfFile) -> tuple[BuildId | None, bool]:
    sections = read_sections(source, elf)
    notes = [(section.offset, section.size) for section in sections if section.kind == _SHT_NOTE]
    return _read_notes(source, notes)


def _read_notes(source: Source, notes: list[tuple[int, int]]) -> tuple[BuildId | None, bool]:
    """Returns the build id (None if missing or malformed), and whether the file has a Go note."""
    build_id, is_go, left = None, False, MAX_NOTE_BYTES
    for offset, size in notes:
        left -= size
        if left < 0 or offset + size > source.size:
            break
        data = source.read(offset, size)
        build_id = build_id or find_build_id(data)
        is_go = is_go or _GO_NOTE in data
    return build_id, is_go
