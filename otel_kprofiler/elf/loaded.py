"""Reads ELF files as loaded by the dynamic linker, from a process's memory.

The program headers, the dynamic section and its tables are in memory, so the file is not needed.
Formats: elf(5); System V ABI, chapter 5; GNU's hash table as binutils writes it; and table 4.9 of
the x86-64 ABI (relocations). The memory is untrusted: all reads are bounded, and anything malformed
raises :class:`ElfError`.
"""

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from otel_kprofiler.elf.headers import HEADER, IDENT, PROGRAM_HEADER
from otel_kprofiler.elf.problem import ElfError, ElfProblem

Read = Callable[[int, int], bytes]
"""Reads memory, given an address and a byte count. Raises ``OSError`` if any byte is unmapped."""

_DYNAMIC: Final = struct.Struct("<QQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_RELOCATION: Final = struct.Struct("<QQq")
_WORD: Final = struct.Struct("<I")
_WORDS_4: Final = struct.Struct("<4I")
_PT_LOAD, _PT_DYNAMIC, _PT_NOTE, _PT_TLS = 1, 2, 4, 7
_PF_W: Final = 2
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 4, 5, 6, 0x6FFFFEF5
_DT_RELA, _DT_RELASZ, _DT_JMPREL, _DT_PLTRELSZ, _DT_PLTREL = 7, 8, 23, 2, 20
_STT_TLS: Final = 6
_HEADER_SPACE: Final = 4096  # the program headers begin within this distance of the ELF header

MAX_PROGRAM_HEADERS: Final = 128
MAX_DYNAMIC_BYTES: Final = 64 * 1024
MAX_CHAIN: Final = 4096
MAX_RELOCATION_BYTES: Final = 32 << 20
_CHUNK_BYTES: Final = 24 * 64 * 1024


class ThreadStorage(NamedTuple):
    """A file's PT_TLS segment, which is copied for each thread.

    Attributes:
        address: SVMA of the TLS initialization image.
        size: size of each thread's copy in bytes, without padding.
        alignment: alignment of each thread's copy in bytes; a power of two.
    """

    address: int
    size: int
    alignment: int

    @property
    def distance(self) -> int:
        """Returns the number of bytes from each copy to the thread pointer (x86-64 executables).

        A copy is aligned like the segment (Drepper, ELF Handling For Thread-Local Storage, 3.4.6).
        """
        return self.size + (-self.address - self.size & self.alignment - 1)


class LoadedElf(NamedTuple):
    """An ELF file as loaded into a process's memory.

    Attributes:
        base: runtime address of the file's first byte.
        bias: runtime address minus SVMA.
        headers_at: runtime address of the program headers.
        storage: the PT_TLS segment; None if missing.
        dynamic: values in the dynamic section, by tag (the first value if a tag is repeated); empty
            if the file has no PT_TLS segment.
        notes: runtime address and size of each PT_NOTE segment.
        writable: runtime address and file size of each writable PT_LOAD segment.
    """

    base: int
    bias: int
    headers_at: int
    storage: ThreadStorage | None
    dynamic: dict[int, int]
    notes: tuple[tuple[int, int], ...] = ()
    writable: tuple[tuple[int, int], ...] = ()

    def at(self, tag: int) -> int | None:
        """Returns the runtime address in the dynamic entry with the given tag; None if missing.

        glibc adds the bias to the addresses in the dynamic section in memory, but musl does not.
        """
        value = self.dynamic.get(tag)
        if value is None:
            return None
        return value if value >= self.base else value + self.bias


class Relocation(NamedTuple):
    """A relocation: runtime address of its target, relocation type, symbol index and addend."""

    address: int
    kind: int
    symbol: int
    addend: int


def read_loaded(read: Read, base: int, machine: int) -> LoadedElf:
    """Reads the headers and the dynamic section of a file whose first byte is at ``base``.

    Raises ``ElfError`` if the file is malformed, or not an ELF file for ``machine``
    (``e_machine``), and ``OSError`` if the memory cannot be read.
    """
    header = read(base, HEADER.size)
    if not header.startswith(IDENT):
        raise ElfError(ElfProblem.NOT_ELF)
    _, code, _, _, at, _, _, _, size, count, *_ = HEADER.unpack(header)
    is_odd = size != PROGRAM_HEADER.size or not 0 < count <= MAX_PROGRAM_HEADERS
    if code != machine or is_odd or at > _HEADER_SPACE:
        raise ElfError(
            ElfProblem.DAMAGED_HEADERS, f"invalid e_machine {code}, e_phnum {count} or e_phoff {at}"
        )
    bias, storage, dynamic = None, None, (0, 0)
    rows = [*PROGRAM_HEADER.iter_unpack(read(base + at, size * count))]
    for row in rows:
        kind, _, offset, address, _, _, memory_size, alignment = row
        if kind == _PT_LOAD and not offset and bias is None:
            bias = base - address
        elif kind == _PT_DYNAMIC:
            dynamic = address, memory_size
        elif kind == _PT_TLS:
            if alignment & (alignment - 1):
                raise ElfError(ElfProblem.DAMAGED_HEADERS, f"invalid PT_TLS alignment {alignment}")
            storage = ThreadStorage(address, memory_size, max(alignment, 1))
    if bias is None or dynamic[1] > MAX_DYNAMIC_BYTES:
        detail = f"no segment at offset 0, or a dynamic section of {dynamic[1]} bytes"
        raise ElfError(ElfProblem.DAMAGED_HEADERS, detail)
    tags: dict[int, int] = {}
    if storage and dynamic[1]:
        raw = read(bias + dynamic[0], dynamic[1] // _DYNAMIC.size * _DYNAMIC.size)
        for tag, value in _DYNAMIC.iter_unpack(raw):
            if not tag:
                break
            tags.setdefault(tag, value)
    notes = tuple([(bias + row[3], row[5]) for row in rows if row[0] == _PT_NOTE])
    writable = [(bias + row[3], row[5]) for row in rows if row[0] == _PT_LOAD and row[1] & _PF_W]
    return LoadedElf(base, bias, base + at, storage, tags, notes, tuple(writable))


def find_thread_variable(read: Read, elf: LoadedElf, name: bytes) -> tuple[int, int] | None:
    """Finds a thread-local variable that a file exports.

    Returns the variable's index in the dynamic symbol table, and its offset in the PT_TLS segment;
    None if the file does not export the variable. Raises ``ElfError`` if a table is malformed, or
    ``OSError`` if the memory cannot be read.
    """
    symbols, strings = elf.at(_DT_SYMTAB), elf.at(_DT_STRTAB)
    if not elf.storage or symbols is None or strings is None:
        return None
    table, numbers = elf.at(_DT_GNU_HASH), _numbers_gnu
    if table is None:
        table, numbers = elf.at(_DT_HASH), _numbers_sysv
    if table is None:
        return None
    for number in numbers(read, table, name):
        raw = read(symbols + number * _SYMBOL.size, _SYMBOL.size)
        at, info, _, section, value, _ = _SYMBOL.unpack(raw)
        is_variable = info & 0xF == _STT_TLS and section and value < elf.storage.size
        if is_variable and read(strings + at, len(name) + 1) == name + b"\0":
            return number, value
    return None


def find_relocations(
    read: Read, elf: LoadedElf, symbol: int, kinds: tuple[int, ...]
) -> Iterator[Relocation]:
    """Yields relocations with a type in ``kinds``, against ``symbol`` or the file itself (index 0).

    Raises ``ElfError`` if there are too many relocations, or ``OSError`` if memory cannot be read.
    """
    needles = [struct.pack("<II", kind, number) for kind in kinds for number in {symbol, 0}]
    tables = [(elf.at(_DT_RELA), elf.dynamic.get(_DT_RELASZ, 0))]
    if elf.dynamic.get(_DT_PLTREL) == _DT_RELA:
        tables.append((elf.at(_DT_JMPREL), elf.dynamic.get(_DT_PLTRELSZ, 0)))
    for table, size in tables:
        if size > MAX_RELOCATION_BYTES:
            raise ElfError(ElfProblem.DAMAGED_HEADERS, f"too many relocations: {size} bytes")
        for done in range(0, size if table is not None else 0, _CHUNK_BYTES):
            rows = read((table or 0) + done, min(_CHUNK_BYTES, size - done))
            for needle in needles:
                at = rows.find(needle)
                while at >= 0:
                    start = at - 8
                    if start % _RELOCATION.size == 0 and start + _RELOCATION.size <= len(rows):
                        address, info, addend = _RELOCATION.unpack_from(rows, start)
                        yield Relocation(elf.bias + address, info & 0xFFFFFFFF, info >> 32, addend)
                    at = rows.find(needle, at + 1)


def _numbers_gnu(read: Read, table: int, name: bytes) -> Iterator[int]:
    buckets, first, bloom, _ = _WORDS_4.unpack(read(table, _WORDS_4.size))
    if not buckets:
        return
    hashed = 5381
    for byte in name:
        hashed = hashed * 33 + byte & 0xFFFFFFFF
    starts = table + _WORDS_4.size + bloom * 8
    (number,) = _WORD.unpack(read(starts + hashed % buckets * 4, 4))
    if number < first:
        return
    chain = starts + buckets * 4 - first * 4
    for current in range(number, number + MAX_CHAIN):
        (word,) = _WORD.unpack(read(chain + current * 4, 4))
        if word | 1 == hashed | 1:
            yield current
        if word & 1:
            return
    raise ElfError(ElfProblem.DAMAGED_HEADERS, "a hash chain is not terminated")


def _numbers_sysv(read: Read, table: int, name: bytes) -> Iterator[int]:
    buckets, _ = struct.unpack("<II", read(table, 8))
    if not buckets:
        return
    hashed = 0
    for byte in name:
        hashed = (hashed << 4) + byte
        high = hashed & 0xF0000000
        hashed = (hashed ^ high >> 24) & ~high & 0xFFFFFFFF
    (number,) = _WORD.unpack(read(table + 8 + hashed % buckets * 4, 4))
    for _ in range(MAX_CHAIN):
        if not number:
            return
        yield number
        (number,) = _WORD.unpack(read(table + 8 + buckets * 4 + number * 4, 4))
    raise ElfError(ElfProblem.DAMAGED_HEADERS, "a hash chain is not terminated")
