"""Finds the code for CPython's evaluation loop in an ELF file.

The loop has a dynamic symbol, but compilers split off cold code (with profile data, most of the
loop), and stripping removes the cold code's symbol. The cold code is therefore located through the
loop's jumps. The bounds of the cold code are read from the unwind information (Linux Standard Base,
"Exception Frames").
"""

import re
import struct
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import Final

from otel_kprofiler.elf import MACHINES, ElfError, ElfFile, ElfSymbol, Source, find_offset

MAX_LOOP_BYTES: Final = 1 << 20
MAX_TABLE_BYTES: Final = 4 << 20
"""Size limit for the unwind search table, in bytes. In Debian's Python, the table is 100 KB."""
_X86_JUMP: Final = re.compile(rb"(?=\x0f[\x80-\x8f](.{4}))", re.DOTALL)  # jcc rel32
_X86_JUMP_BYTES: Final = 6
# Arm Architecture Reference Manual for A-profile, C4.1: mask, value, and bits of the offset
_A64_JUMPS: Final = (
    (0xFC000000, 0x14000000, 0, 26),  # b
    (0xFF000010, 0x54000000, 5, 19),  # b.cond
    (0x7E000000, 0x34000000, 5, 19),  # cbz, cbnz
)
_A64_BYTES: Final = 4
_LEAST_JUMPS: Final = 3
"""Minimum number of jumps into the loop's cold code. Fewer jumps might be data."""
_SEARCH: Final = struct.Struct("<4siI")
# version and encodings: pairs of signed 32-bit values
_ENCODINGS: Final = bytes([1, 0x1B, 0x03, 0x3B])
_PAIR_BYTES: Final = 8
_ENTRY: Final = struct.Struct("<8xiI")  # start address, relative to this field; size in bytes
_START_AT: Final = 8


def find_loop(source: Source, elf: ElfFile, symbol: ElfSymbol) -> tuple[range, ...]:
    """Returns the address ranges (SVMAs) of the loop's function and of its cold code, if any."""
    loop = range(symbol.address, symbol.address + symbol.size)
    try:
        targets = _jumps_out(source, elf, loop)
        functions = Counter(_find_functions(source, elf, targets))
    except ElfError:
        return (loop,)  # the file is malformed
    most_common = functions.most_common(1)
    if most_common and most_common[0][1] >= max(_LEAST_JUMPS, functions.total() // 2):
        return loop, most_common[0][0]
    return (loop,)


def _jumps_out(source: Source, elf: ElfFile, loop: range) -> list[int]:
    size = min(len(loop), MAX_LOOP_BYTES)
    code = source.read(find_offset(elf.loads, loop.start, size), size)
    find_jumps = _find_a64_jumps if elf.machine == MACHINES["aarch64"] else _find_x86_jumps
    return [
        loop.start + target
        for target in find_jumps(code)
        if loop.start + target not in loop
        and any(
            text.address <= loop.start + target < text.address + text.size for text in elf.texts
        )
    ]


def _find_x86_jumps(code: bytes) -> Iterator[int]:
    """Yields the targets of conditional jumps, relative to the start of the code."""
    for jump in _X86_JUMP.finditer(code):
        yield jump.start() + _X86_JUMP_BYTES + int.from_bytes(jump[1], "little", signed=True)


def _find_a64_jumps(code: bytes) -> Iterator[int]:
    """Yields jump targets, including those of ``b``, because ``b.cond`` has a short range."""
    words = memoryview(code)[: len(code) - len(code) % _A64_BYTES].cast("I")
    for place, word in enumerate(words):
        for mask, value, shift, bits in _A64_JUMPS:
            if word & mask == value:
                sign = 1 << bits - 1
                distance = ((word >> shift) + sign) % (2 * sign) - sign
                yield _A64_BYTES * (place + distance)


def _find_functions(source: Source, elf: ElfFile, targets: list[int]) -> list[range]:
    """Returns the functions that contain jump targets other than their first instruction."""
    if elf.search is None:
        return []
    at, size = elf.search
    head = source.read(find_offset(elf.loads, at, _SEARCH.size), _SEARCH.size)
    encodings, _, count = _SEARCH.unpack(head)
    size = min(size - _SEARCH.size, count * _PAIR_BYTES)
    if encodings != _ENCODINGS or not 0 < size <= MAX_TABLE_BYTES:
        return []
    first = find_offset(elf.loads, at + _SEARCH.size, size)
    pairs = array("i", source.read(first, size - size % _PAIR_BYTES))
    starts, entries = pairs[::2], pairs[1::2]
    functions = []
    for target in targets:
        place = bisect_right(starts, target - at) - 1
        if place < 0:
            continue
        start, entry = at + starts[place], at + entries[place]
        raw = source.read(find_offset(elf.loads, entry, _ENTRY.size), _ENTRY.size)
        distance, length = _ENTRY.unpack(raw)
        if start == entry + _START_AT + distance and start < target < start + length:
            functions.append(range(start, start + length))
    return functions
