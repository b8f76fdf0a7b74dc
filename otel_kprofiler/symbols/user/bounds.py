"""Reads function bounds from unwind information, which even stripped files contain.

Each function has an entry (FDE) in ``.eh_frame``: the entry's length, the distance to its CIE, and
the function's start and size. ``.eh_frame_hdr`` lists the entries, sorted by function start (Linux
Standard Base, "Exception Frames").
"""

from __future__ import annotations

import struct
from array import array
from operator import itemgetter
from typing import Final

from otel_kprofiler.elf import (
    ElfError,
    ElfFile,
    ElfProblem,
    Section,
    Source,
    find_offset,
    make_pairs,
    parse_cie,
)
from otel_kprofiler.symbols.user.budget import ReadingBudget
from otel_kprofiler.symbols.user.functions import Bounds

MAX_INDEXED_BYTES: Final = 16 << 20
"""Size limit for ``.eh_frame`` without a search table. Indexing a section of this size takes half a
second."""
_SEARCH: Final = struct.Struct("<4siI")
_ENCODINGS: Final = bytes([1, 0x1B, 0x03, 0x3B])
"""First bytes of ``.eh_frame_hdr`` as linkers write it: version, and the encodings of address
(pcrel|sdata4), count (udata4) and table (datarel|sdata4).
"""
_PAIR_BYTES: Final = 8
_PAIR_MEMORY_BYTES: Final = 28
"""Memory used to read a pair of the search table: the pair, two copies, and the function's size."""
_BOUND_BYTES: Final = 8
_INDEXED_FACTOR: Final = 16
"""Bytes used to index a byte of ``.eh_frame``: a 16-byte entry becomes two tuples."""
_ENTRY_BYTES: Final = 8  # offset of the function's start address in an entry
_PROBES: Final = 32
_PART: Final = 4096  # functions per step


def read_bounds(
    source: Source,
    elf: ElfFile,
    sections: list[Section],
    limit: int,
    budget: ReadingBudget | None = None,
) -> Bounds | None:
    """Reads the bounds of a file's functions.

    Returns None if the file has no unwind information, if the encodings are unsupported, or if
    indexing needs too much memory. Raises ``ElfError`` if the tables are malformed, are longer than
    ``limit`` bytes, or exceed the budget.
    """
    frames = next((section for section in sections if section.name == b".eh_frame"), None)
    if frames is None or not frames.size:
        return None
    budget = budget or ReadingBudget()
    left_at_start = budget.left_bytes
    bounds = None
    try:
        bounds = _read_bounds(source, elf, frames, limit, budget)
    finally:
        kept = _BOUND_BYTES * len(bounds.starts) if bounds else 0
        budget.give_back(left_at_start - budget.left_bytes - kept)
    return bounds


def _read_bounds(
    source: Source, elf: ElfFile, frames: Section, limit: int, budget: ReadingBudget
) -> Bounds | None:
    content = budget.read_content(source, frames, limit)
    table = _read_search_table(source, elf, limit, budget)
    if table is None:
        taken = _INDEXED_FACTOR * len(content)
        if len(content) > MAX_INDEXED_BYTES or taken > budget.left_bytes:
            return None
        budget.take(taken, ".eh_frame")
        try:
            origin, pairs = frames.address, make_pairs(content, frames.address, frames.address)
        except ValueError as error:
            raise ElfError(ElfProblem.DAMAGED_SECTION, f".eh_frame: {error}") from error
    else:
        origin, pairs = table
    return make_bounds(pairs, origin, content, frames.address)


def make_bounds(pairs: bytes, origin: int, frames: bytes, address: int) -> Bounds | None:
    """Builds the bounds from a search table's pairs and from the ``.eh_frame`` at SVMA ``address``.

    Returns None if the table points outside ``frames``, or if the encodings of the inspected
    entries differ or are not supported. An unsorted table yields fewer bounds.
    """
    columns = array("i", pairs)
    starts, entries = columns[::2], columns[1::2]
    shift = origin - address
    probes = entries[:: len(entries) // _PROBES + 1]
    sizes_at = {_size_at(frames, at + shift) for at in probes}
    first = sizes_at.pop() if len(sizes_at) == 1 else None
    if first is None:
        return None
    first += shift
    words = memoryview(frames)[: len(frames) & -4].cast("I")
    sizes = array("I")
    try:
        for part in range(0, len(entries), _PART):  # small lists remain in the CPU's cache
            indices = _word_indices(entries[part : part + _PART], first)
            # With a single index, an itemgetter would not return a tuple.
            sizes.extend(itemgetter(*indices, indices[0])(words)[:-1])
    except IndexError:
        return None
    return Bounds(origin, starts, sizes)


def _word_indices(entries: array[int], first: int) -> memoryview[int]:
    """Returns ``(entry + first) / 4`` modulo 2^30 for all entries, computed in one operation.

    The sum for an entry carries at most 1 into the next entry, where the division drops the carry.
    """
    ones = int.from_bytes(b"\1\0\0\0" * len(entries), "little")
    sums = int.from_bytes(entries.tobytes(), "little") + ones * (first & 0xFFFFFFFF)
    quotients = sums >> 2 & ones * 0x3FFFFFFF
    return memoryview(quotients.to_bytes(len(entries) * 4, "little")).cast("I")


def _size_at(frames: bytes, at: int) -> int | None:
    """Returns the offset of ``pc_range`` within an FDE; None if it is not four bytes wide."""
    if at & 3 or not 0 <= at <= len(frames) - _ENTRY_BYTES:
        return None
    (back,) = struct.unpack_from("<I", frames, at + 4)
    try:
        form = parse_cie(frames, at + 4 - back).struct
    except ValueError:
        return None
    return _ENTRY_BYTES + form.size


def _read_search_table(
    source: Source, elf: ElfFile, limit: int, budget: ReadingBudget
) -> tuple[int, bytes] | None:
    """Returns the address and table of ``.eh_frame_hdr``; None if missing or unsupported."""
    if elf.search is None:
        return None
    origin, size = elf.search
    at = find_offset(elf.loads, origin, size)
    if size < _SEARCH.size:
        return None
    encodings, _, count = _SEARCH.unpack(source.read(at, _SEARCH.size))
    if encodings != _ENCODINGS or not count:
        return None
    if not count * _PAIR_BYTES <= min(limit, size - _SEARCH.size):
        raise ElfError(ElfProblem.OUT_OF_BOUNDS, f".eh_frame_hdr cannot hold {count} functions")
    budget.take(count * _PAIR_MEMORY_BYTES, ".eh_frame_hdr")
    return origin, source.read(at + _SEARCH.size, count * _PAIR_BYTES)
