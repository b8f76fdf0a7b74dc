"""Opens vmlinux, modules (compressed or not) and separate debug files."""

import mmap
import os
import struct
from io import BytesIO
from typing import Any, Final, NamedTuple

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from otel_kprofiler.elf import find_build_id
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import BuildId
from otel_kprofiler.symbols.compressed import COMPRESSED_SUFFIXES, unpack

SHT_NOBITS: Final = 8
SHT_NOTE: Final = 7
SHF_ALLOC: Final = 2
SHF_EXECINSTR: Final = 4
SHN_XINDEX: Final = 0xFFFF
ET_REL: Final = "ET_REL"
MAX_SECTIONS: Final = 200_000
MAX_NAME_BYTES: Final = 512
MAX_NOTES_BYTES: Final = 16 * 1024 * 1024
DEBUG_ROOT: Final = "/usr/lib/debug"

# Exceptions that pyelftools raises for malformed headers.
_DAMAGED: Final = (
    ELFError, ConstructError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
    struct.error,
)  # fmt: skip
_KERNEL_SUFFIXES: Final = (*COMPRESSED_SUFFIXES, ".debug", ".ko")


class Section(NamedTuple):
    """A section header (elf(5), Elf64_Shdr)."""

    name: str
    type: int
    flags: int
    address: int
    offset: int
    size: int
    alignment: int
    link: int

    @property
    def is_code(self) -> bool:
        """Returns whether the section contains instructions and is loaded."""
        return self.flags & (SHF_ALLOC | SHF_EXECINSTR) == SHF_ALLOC | SHF_EXECINSTR


class ElfImage(NamedTuple):
    """A 64-bit ELF file.

    Attributes:
        name: ``vmlinux``, or the module's name, in which ``_`` replaces ``-``.
        relocatable: whether the file is a module, whose sections have no addresses yet.
        byte_order: the byte order, as in ``struct``: ``<`` or ``>``.
        data: the decompressed content of the file.
    """

    path: str
    name: str
    relocatable: bool
    byte_order: str
    sections: tuple[Section, ...]
    build_id: BuildId | None
    data: bytes | mmap.mmap

    def content(self, section: Section) -> bytes:
        """Returns a section's bytes.

        The content is empty if a debug file omits it, and incomplete if the file is truncated.
        """
        if section.type == SHT_NOBITS:
            return b""
        return bytes(self.data[section.offset : section.offset + section.size])


def open_elf(path: str) -> ElfImage:
    """Read the headers of an ELF file, which may be a ``.ko.xz``, ``.ko.gz`` or ``.ko.zst``.

    Raises:
        OSError: the file cannot be read.
        KProfilerError: the file is not a 64-bit ELF file, or is malformed.
        DependencyError: the file requires ``zstandard``, which is not installed.
    """
    data = unpack(path, _read(path))
    try:
        stream: Any = BytesIO(data) if isinstance(data, bytes) else data
        elf = ELFFile(stream)
        if elf.elfclass != 64:
            raise KProfilerError(
                f"{path} is a {elf.elfclass}-bit ELF file; only 64-bit kernels are supported"
            )
        order = "<" if elf.little_endian else ">"
        sections = _read_sections(data, elf.header, order)
    except _DAMAGED as error:
        raise KProfilerError(f"{path} is not a usable ELF file: {error}") from error
    relocatable = elf["e_type"] == ET_REL
    image = ElfImage(path, _module_name(path), relocatable, order, sections, None, data)
    return image._replace(build_id=_find_build_id(image))


def _read_sections(data: bytes | mmap.mmap, header: Any, order: str) -> tuple[Section, ...]:
    shdr = struct.Struct(order + "IIQQQQIIQQ")
    start, count, names_index = header["e_shoff"], header["e_shnum"], header["e_shstrndx"]
    if not start:
        return ()
    if header["e_shentsize"] != shdr.size:
        raise ValueError("its e_shentsize is wrong for a 64-bit file")
    # section 0 holds counts that do not fit in the ELF header
    first = shdr.unpack_from(data, start)
    count, names_index = count or first[5], first[6] if names_index == SHN_XINDEX else names_index
    if not names_index < count <= MAX_SECTIONS or start + count * shdr.size > len(data):
        raise ValueError(f"the {count} section headers are out of range or have no names")
    rows = list(shdr.iter_unpack(data[start : start + count * shdr.size]))
    names_at, names_size = rows[names_index][4:6]
    names = data[names_at : names_at + names_size]
    return tuple(
        Section(_name(names, row[0]), row[1], row[2], row[3], row[4], row[5], row[8], row[6])
        for row in rows
    )


def _name(names: bytes, at: int) -> str:
    end = names.find(b"\0", at, at + MAX_NAME_BYTES)
    return names[at : end if end >= 0 else at + MAX_NAME_BYTES].decode("utf-8", "backslashreplace")


def _find_build_id(image: ElfImage) -> BuildId | None:
    left = MAX_NOTES_BYTES
    for section in image.sections:
        if section.type == SHT_NOTE:
            content = image.content(section)
            left -= len(content)
            if left < 0:
                raise KProfilerError(
                    f"{image.path} has more than {MAX_NOTES_BYTES >> 20} MiB of notes"
                )
            if build_id := find_build_id(content):
                return build_id
    return None


def find_debug_file(build_id: BuildId, root: str = DEBUG_ROOT) -> str | None:
    """Returns the path of the installed debug file for a build id; None if there is none."""
    path = os.path.join(root, ".build-id", build_id[:2], f"{build_id[2:]}.debug")
    return path if os.path.exists(path) else None


def _read(path: str) -> bytes | mmap.mmap:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def _module_name(path: str) -> str:
    name = os.path.basename(path)
    while (stem := os.path.splitext(name))[1] in _KERNEL_SUFFIXES:
        name = stem[0]
    return "vmlinux" if name.startswith("vmlinux") else name.replace("-", "_")
