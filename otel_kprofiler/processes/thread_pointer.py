"""Locates the thread-local variable in which a process publishes thread contexts (OTEP 4947).

The thread-local variable is ``otel_thread_ctx_v1``; in Node.js, ``otel_thread_ctx_nodejs_v1``. The
variable's location is derived from the definition in the program, or from a library's references
that the dynamic linker has resolved. The location is an offset from the thread pointer, or an
offset in a module's TLS block, which is located through the dynamic thread vector (DTV).

Sources: for relocations, the ABIs of x86-64 (section 4.4.1) and AArch64 (ELF, section 5.7), and
Oliva's RFC TLSDESC-x86; for the values that the linker writes to memory, glibc's
sysdeps/{x86_64,aarch64}/dl-machine.h and dl-tlsdesc.h, and musl's ldso/dynlink.c and
pthread_arch.h.
"""

import struct
from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple

from otel_kprofiler.bpf import ContextPlace
from otel_kprofiler.elf import (
    MACHINES,
    ElfError,
    LoadedElf,
    Read,
    ThreadStorage,
    find_relocations,
    find_thread_variable,
    read_loaded,
)
from otel_kprofiler.host import MemoryMapping

VARIABLE: Final = b"otel_thread_ctx_v1"
NODEJS_VARIABLE: Final = b"otel_thread_ctx_nodejs_v1"
MAX_OBJECTS: Final = 4096
MAX_DEFINITIONS: Final = 16
"""Maximum number of libraries searched for the variable's location."""
MAX_REFERENCES: Final = 64
_POINTER_BYTES: Final = 8
_WORDS_2: Final = struct.Struct("<QQ")
_AT_PHDR: Final = 3
_MAX_MODULE: Final = 1 << 16
_MOST_STATIC: Final = 1 << 31
_MOST_ABOVE: Final = 1 << 16  # vm.mmap_min_addr, below which nothing is mapped
_MUSL: Final = "libc.so"
"""File name of musl's C library and linker. glibc's file name contains a version."""
_ALPINE: Final = ("ld-musl-", "libc.musl-")


class LoadedObject(NamedTuple):
    """The address range of a mapped file, from its first byte to the end of its last mapping."""

    start: int
    end: int
    path: str


class _Machine(NamedTuple):
    """A processor's relocation types, and the offsets of the TLS block and the DTV pointer.

    Attributes:
        dtpmod: the relocation type for a TLS module id; the next word is an offset.
        tpoff: the relocation type for an offset from the thread pointer.
        head: the distance, in bytes, from the thread pointer up to the program's TLS block; None if
            the block is below the thread pointer.
        glibc_vector: the offset from the thread pointer at which glibc stores the DTV's address.
        musl_vector: the offset at which musl stores the DTV's address.
    """

    dtpmod: int
    tpoff: int
    tlsdesc: int
    head: int | None
    glibc_vector: int
    musl_vector: int


_MACHINES: Final = {
    "x86_64": _Machine(16, 18, 36, None, 8, 8),
    "aarch64": _Machine(1028, 1030, 1031, 16, 0, -8),
}


class _Vector(NamedTuple):
    """A libc's dynamic thread vector: its entry size, and the offsets of its length and address."""

    stride: int
    length_at: int
    address_at: int
    has_generations: bool


class _Threads(NamedTuple):
    machine: _Machine
    vector: _Vector


def find_objects(mappings: Iterable[MemoryMapping]) -> list[LoadedObject]:
    """Returns the executable files mapped from their first byte, sorted by address."""
    objects: list[list[MemoryMapping]] = []
    for mapping in mappings:
        if mapping.inode and not mapping.file_offset:
            objects.append([mapping])
        elif objects and (mapping.device, mapping.inode) == _file_of(objects[-1][0]):
            objects[-1].append(mapping)
    return [
        LoadedObject(parts[0].start, parts[-1].end, parts[0].path)
        for parts in objects
        if any(part.is_executable for part in parts)
    ]


def _file_of(mapping: MemoryMapping) -> tuple[int, int]:
    return mapping.device, mapping.inode


def parse_headers_address(auxv: bytes) -> int:
    """Returns the program header address (AT_PHDR) from ``/proc/PID/auxv``; 0 if absent."""
    whole = auxv[: len(auxv) // _WORDS_2.size * _WORDS_2.size]
    return next((value for tag, value in _WORDS_2.iter_unpack(whole) if tag == _AT_PHDR), 0)


def find_context_place(
    read: Read,
    objects: list[LoadedObject],
    headers_at: int,
    name: bytes = VARIABLE,
    machine: str = "x86_64",
) -> ContextPlace | None:
    """Locates the thread-local variable ``name``; None if it is undefined or not yet resolved.

    The program's definition takes precedence over libraries' definitions, as in the dynamic linker.
    ``headers_at`` is the address of the executable's program headers. ``machine`` is the machine
    name from uname(2); returns None for all but x86_64 and aarch64.
    """
    kinds = _MACHINES.get(machine)
    if kinds is None:
        return None
    if any(_is_musl(loaded.path) for loaded in objects):
        vector = _Vector(8, 0, kinds.musl_vector, has_generations=False)
    else:
        vector = _Vector(16, -16, kinds.glibc_vector, has_generations=True)
    threads = _Threads(kinds, vector)
    place: ContextPlace | None = None
    definitions = 0
    for loaded in objects[:MAX_OBJECTS]:
        try:
            elf = read_loaded(read, loaded.start, MACHINES[machine])
            variable = find_thread_variable(read, elf, name)
            if not variable or not elf.storage:
                continue
            if elf.headers_at == headers_at:
                return ContextPlace(_in_program(elf.storage, variable[1], kinds))
            definitions += 1
            if not place and definitions <= MAX_DEFINITIONS:
                place = _find_in_library(read, elf, loaded.end, variable, threads)
        except (ElfError, OSError):
            continue  # not an ELF file, malformed, or already unmapped
    return place


def _is_musl(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name == _MUSL or name.startswith(_ALPINE)


def _in_program(storage: ThreadStorage, value: int, kinds: _Machine) -> int:
    if kinds.head is None:
        return value - storage.distance
    return -(-kinds.head // storage.alignment) * storage.alignment + value


def _find_in_library(
    read: Read, elf: LoadedElf, end: int, variable: tuple[int, int], threads: _Threads
) -> ContextPlace | None:
    kinds, vector = threads
    symbol, value = variable
    wanted = (kinds.tpoff, kinds.tlsdesc, kinds.dtpmod)
    for relocation in islice(find_relocations(read, elf, symbol, wanted), MAX_REFERENCES):
        # A relocation without a symbol refers to this file; the addend is the variable's offset.
        if not relocation.symbol and relocation.kind != kinds.dtpmod and relocation.addend != value:
            continue
        first, second = _WORDS_2.unpack(read(relocation.address, _WORDS_2.size))
        place: ContextPlace | None = None
        if relocation.kind == kinds.tpoff:
            place = _static(first, kinds)
        elif relocation.kind == kinds.dtpmod:
            place = _dynamic(first, second if relocation.symbol else value, 0, vector)
        elif first and (place := _static(second, kinds)):
            pass
        elif first and not elf.base <= second < end:  # unresolved words point into the file
            place = _read_descriptor(read, second, vector)
        if place:
            return place
    return None


def _read_descriptor(read: Read, address: int, vector: _Vector) -> ContextPlace | None:
    """Reads a dynamic TLS descriptor's module and offset, and in glibc also its generation."""
    module, offset = _WORDS_2.unpack(read(address, _WORDS_2.size))
    generation = 0
    if vector.has_generations:
        generation = int.from_bytes(read(address + _WORDS_2.size, 8), "little")
    return _dynamic(module, offset, generation, vector)


def _static(word: int, kinds: _Machine) -> ContextPlace | None:
    """Returns a variable's location from its thread pointer offset; None if the offset is invalid.

    Offsets are negative on x86-64. Positive offsets are below the lowest address that can be
    mapped.
    """
    if kinds.head is not None:
        return ContextPlace(word) if kinds.head <= word < _MOST_ABOVE else None
    distance = -word & (1 << 64) - 1
    return ContextPlace(-distance) if _POINTER_BYTES <= distance < _MOST_STATIC else None


def _dynamic(module: int, offset: int, generation: int, vector: _Vector) -> ContextPlace | None:
    if not 0 < module < _MAX_MODULE or offset >= _MOST_STATIC:
        return None
    return ContextPlace(
        offset, module, generation, vector.stride, vector.length_at, vector.address_at
    )
