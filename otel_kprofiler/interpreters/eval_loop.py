"""Finds the code of CPython's evaluation loop in an ELF file.

It has a symbol for the dynamic linker, but compilers move what runs rarely, by a profile even most
of it, to another place, whose symbol is stripped. The loop jumps there; the unwind information
states where that part begins and ends (Linux Standard Base, "Exception Frames").
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_right
from collections import Counter
from typing import Final

from otel_kprofiler.elf import ElfError, ElfFile, ElfSymbol, Source, find_offset

MAX_LOOP_BYTES: Final = 1 << 20
MAX_TABLE_BYTES: Final = 4 << 20
"""Most bytes of the search table; Debian's Python has 100 KB."""
_JUMP: Final = re.compile(rb"(?=\x0f[\x80-\x8f](.{4}))", re.DOTALL)  # jcc rel32
_JUMP_BYTES: Final = 6
_LEAST_JUMPS: Final = 3
"""Fewer may be bytes that only look like jumps."""
_SEARCH: Final = struct.Struct("<4siI")
_ENCODINGS: Final = bytes([1, 0x1B, 0x03, 0x3B])  # what linkers write: pairs of signed 32 bits
_PAIR_BYTES: Final = 8
_ENTRY: Final = struct.Struct("<8xiI")  # start, from itself; number of bytes
_START_AT: Final = 8


def find_loop(source: Source, elf: ElfFile, symbol: ElfSymbol) -> tuple[range, ...]:
    """SVMAs of the loop: of the function itself, then of the part that was moved elsewhere, if any.

    Args:
        source: the file.
        elf: its headers.
        symbol: ``_PyEval_EvalFrameDefault``.
    """
    loop = range(symbol.address, symbol.address + symbol.size)
    try:
        targets = _jumps_out(source, elf, loop)
        functions = Counter(_find_functions(source, elf, targets))
    except ElfError:
        return (loop,)  # without unwind information, or damaged
    most_common = functions.most_common(1)
    if most_common and most_common[0][1] >= max(_LEAST_JUMPS, functions.total() // 2):
        return loop, most_common[0][0]
    return (loop,)


def _jumps_out(source: Source, elf: ElfFile, loop: range) -> list[int]:
    """Where conditional jumps lead that leave the loop, in code of the file."""
    size = min(len(loop), MAX_LOOP_BYTES)
    code = source.read(find_offset(elf.loads, loop.start, size), size)
    targets = [
        loop.start + jump.start() + _JUMP_BYTES + int.from_bytes(jump[1], "little", signed=True)
        for jump in _JUMP.finditer(code)
    ]
    return [
        target
        for target in targets
        if target not in loop
        and any(text.address <= target < text.address + text.size for text in elf.texts)
    ]


def _find_functions(source: Source, elf: ElfFile, targets: list[int]) -> list[range]:
    """The functions that these addresses lie in, except for those that they are the start of."""
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
