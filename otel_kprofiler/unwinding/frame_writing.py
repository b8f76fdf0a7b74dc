"""Writes ``.eh_frame`` with a search table.

Runs in child processes, so it imports nothing from this package.
"""

import gc
import itertools
import mmap
import os
import resource
import struct
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

MEMORY_BYTES: Final = 1 << 30
"""Limit, in bytes, on the address space of a process that builds tables."""
COUNT: Final = struct.Struct("<I")
"""Format of the pair count, which precedes the pairs in the output."""
PAIR: Final = struct.Struct("<ii")
"""A row of the search table: a function's start and its entry, relative to the table's origin."""
# Alignments 1 and -8, return address 16, pointers pcrel|sdata4; then def_cfa rsp 8; offset rip 1;
# undefined rbx, r12 to r15.
CIE_REST: Final = b"\1\x78\x10\1\x1b\x0c\7\x08\x90\1\7\3\7\x0c\7\x0d\7\x0e\7\x0f"
"""The part of a version 1 CIE after the augmentation string."""
SIGRETURN: Final = bytes.fromhex("48c7c00f0000000f05")  # mov $15, %rax; syscall
"""Code of a signal trampoline."""
BY_RSP: Final = b"\x0c\7"
"""CFA instruction ``def_cfa rsp``, without its offset operand."""
RBP_KEPT: Final = b"\xc6"
"""CFA instruction ``restore rbp``."""
RBP_LOST: Final = b"\7\6"
"""CFA instruction ``undefined rbp``."""
NO_CALLER: Final = b"\7\x10"
"""CFA instruction ``undefined rip``, which marks the outermost frame."""
NO_RULE: Final = b"\x16\x10\0"
"""CFA instruction ``val_expression rip`` with an empty expression, which truncates the stack."""
_ENTRY: Final = struct.Struct("<IIiIB")  # length, distance to CIE; start, size, no augmentation
_ADVANCES: Final = (b"", *(bytes([0x40 | distance]) for distance in range(1, 64)))

PADDINGS: Final = tuple(bytes(-(_ENTRY.size + size) & 3) for size in range(4))
"""Bytes (DW_CFA_nop) that pad a CFA program to a valid size, by the program's size modulo 4."""

Rows = list[tuple[int, bytes]]
"""CFA instructions, by code offset."""


class Segment(NamedTuple):
    """A range of a file, and the address at which the range is mapped."""

    offset: int
    size: int
    address: int


def pack_number(value: int) -> bytes:
    """Packs a number as ULEB128."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def pack_cie(augmentation: bytes, rest: bytes) -> bytes:
    """Packs a CIE. ``rest`` contains the bytes after the augmentation string, without padding."""
    body = b"\1" + augmentation + b"\0" + rest
    body += bytes(-len(body) % 4)
    return struct.pack("<II", 4 + len(body), 0) + body


def make_program(rows: Rows, unit: int = 1) -> bytes:
    """Generates a CFA program from rows, and pads it with DW_CFA_nop to a valid entry size.

    ``unit`` is the CIE's code alignment factor.
    """
    out, now = [], 0
    for at, code in rows:
        distance = (at - now) // unit
        out.append(_ADVANCES[distance] if distance < len(_ADVANCES) else advance(distance))
        out.append(code)
        now = at
    program = b"".join(out)
    return program + PADDINGS[len(program) & 3]


def advance(distance: int) -> bytes:
    """Packs a CFA instruction that advances the code offset; empty for a distance of 0."""
    if distance < len(_ADVANCES):
        return _ADVANCES[distance]
    if distance < 1 << 16:
        return b"\3" + distance.to_bytes(2, "little")
    return struct.pack("<BI", 4, distance)  # a larger distance is malformed: struct.error


def pack_entry(back: int, start: int, address: int, size: int, program: bytes) -> bytes:
    """Packs an entry (FDE) of ``.eh_frame`` for the ``size`` bytes of code at ``start``.

    ``back`` is the distance in bytes from the CIE to the entry's second word. ``address`` is the
    address of the entry.
    """
    length = _ENTRY.size - 4 + len(program)
    return _ENTRY.pack(length, back, start - (address + 8), size, 0) + program


def pack_tables(made: Iterable[tuple[int, int]], frames: bytes, pairs: bytes, origin: int) -> bytes:
    """Packs the tables. Raises ``ValueError`` if a function is too far from ``origin``."""
    try:
        rows = [(start - origin, entry - origin) for start, entry in made]
        rows += PAIR.iter_unpack(pairs)
        rows.sort()
        search = struct.pack(f"<{2 * len(rows)}i", *itertools.chain.from_iterable(rows))
    except struct.error as error:
        raise ValueError("a function is too far from the search table") from error
    return join_tables(search, frames)


def join_tables(search: bytes, frames: bytes | bytearray) -> bytes:
    """Joins a search table and the entries, after the number of pairs."""
    return b"".join((COUNT.pack(len(search) // PAIR.size), search, frames))


def limit_memory() -> None:
    """Limit the address space of this process to ``MEMORY_BYTES``."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    gc.disable()  # none of the many objects is part of a reference cycle


def make_tables(fd: int, make: Callable[[mmap.mmap], bytes]) -> bytes:
    """Maps a file, and returns the tables that ``make`` generates from it.

    If ``make`` fails, raises ``SystemExit`` with the reason, which Python prints to standard error.
    """
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as file:
            return make(file)
    except (ValueError, OSError, MemoryError, struct.error) as error:
        raise SystemExit(str(error) or type(error).__name__) from error


def write_all(result: bytes) -> None:
    """Write all bytes to standard output."""
    view = memoryview(result)
    while view:
        view = view[os.write(1, view) :]
