"""Finds code without unwind rules, such as musl's code in a statically linked program."""

import bisect
import operator
import re
import struct
from collections.abc import Iterator
from typing import Final

from otel_kprofiler.elf import (
    ElfError,
    ElfFile,
    ImageSource,
    Source,
    find_offset,
    read_dynamic_linker,
)
from otel_kprofiler.unwinding.table import Tables, read_chunks

Gap = tuple[int, int]

_FAR_BYTES: Final = 4096
"""Functions that start at least this many bytes apart are checked for a gap between them."""
_LEAST_BYTES: Final = 1024
"""Minimum total size of gaps that justifies a child process, in bytes. Linkers alone leave gaps of
about 200 bytes in total."""
_PADDING: Final = 64
_ALIGNMENT: Final = 16
_MAX_SIZES: Final = 20_000
"""If ``main`` has no rule, all function sizes are read in tables with up to this many entries."""
_ENTRY_BYTES: Final = 48
_TAKE_MAIN: Final = re.compile(rb"\x48(?:\x8d\x3d(.{4})|\xc7\xc7(.{4}))", re.DOTALL)
"""Instruction that loads ``main``: lea OFFSET(%rip), %rdi; or mov $ADDRESS, %rdi."""
_ADDRESS: Final = struct.Struct("<i")
_MAX_GAPS: Final = 1024
_SIZE_AT: Final = 12
"""Offset of the function's size in an FDE with 32-bit pointers, as emitted by linkers."""
_SIZE: Final = struct.Struct("<I")


def find_gaps(source: Source, elf: ElfFile, tables: Tables | None) -> list[Gap]:
    """Returns code ranges without unwind rules, in address order; empty if they are negligible.

    Raises ``ElfError`` if the file cannot be read.
    """
    if tables is None:
        gaps = [(text.address, text.address + text.size) for text in elf.texts]
        return gaps if _size_of(gaps) >= _LEAST_BYTES else []
    if not elf.entry:
        return []  # a library that has unwind tables
    starts = find_starts(source, elf)
    gaps = _find(source, elf, tables, starts, _FAR_BYTES)
    lacking = [any(start <= at < end for start, end in gaps) for at in starts]
    # musl's entry point has no unwind rule. main has no rule in programs compiled without tables.
    # In other files, gaps are assembly or functions that V8 embeds. Filling those gaps is not worth
    # delaying the tables that these files already have.
    if lacking[-1] and tables.entries <= _MAX_SIZES:
        gaps = _find(source, elf, tables, starts, 0)
    elif any(lacking):
        gaps = [gap for gap in gaps if gap[1] - gap[0] > _PADDING]
    else:
        return []
    is_large = _size_of(gaps) >= _LEAST_BYTES or bool(read_dynamic_linker(source))
    return gaps[:_MAX_GAPS] if is_large else []


def find_starts(source: Source, elf: ElfFile) -> list[int]:
    """Finds a program's entry point, and ``main`` if the entry point loads its address."""
    try:
        at = find_offset(elf.texts, elf.entry, _ENTRY_BYTES)
    except ElfError:
        return [elf.entry]
    code = source.read(at, _ENTRY_BYTES)
    if not (match := _TAKE_MAIN.search(code)):
        return [elf.entry]
    base = elf.entry + match.end() if match[1] else 0
    return [elf.entry, base + _ADDRESS.unpack(match[1] or match[2])[0]]


def _size_of(gaps: list[Gap]) -> int:
    return sum(end - start for start, end in gaps)


def _find(
    source: Source, elf: ElfFile, tables: Tables, starts: list[int], far_bytes: int
) -> list[Gap]:
    """Finds gaps, other than padding, that contain one of ``starts`` or exceed ``far_bytes``."""
    gaps: list[Gap] = []
    covered = list(_covered(source, elf, tables, starts, far_bytes))
    for text in elf.texts:
        at, text_end = text.address, text.address + text.size
        for start, end in covered:
            if text.address <= start < text_end:
                gaps.append((at, start))
                at = max(at, end)
        gaps.append((at, text_end))
    return [(start, end) for start, end in gaps if end - start > _ALIGNMENT]


def _covered(
    source: Source, elf: ElfFile, tables: Tables, starts: list[int], far_bytes: int
) -> Iterator[Gap]:
    origin = tables.origin
    near = [at - origin for at in starts]
    first: int | None = None
    last = last_entry = 0
    for functions, entries in _columns(source, tables):
        previous = [last, *functions[:-1]]
        distances = map(operator.sub, functions, previous)
        breaks = {index for index, distance in enumerate(distances) if distance > far_bytes}
        for at in near:
            index = bisect.bisect_right(functions, at)
            if index < len(functions) and previous[index] <= at:
                breaks.add(index)
        if first is None:
            first = functions[0]
            breaks.discard(0)
        for index in sorted(breaks):
            entry = entries[index - 1] if index else last_entry
            yield origin + first, origin + previous[index] + _size(source, elf, origin + entry)
            first = functions[index]
        last, last_entry = functions[-1], entries[-1]
    if first is not None:
        yield origin + first, origin + last + _size(source, elf, origin + last_entry)


def _columns(source: Source, tables: Tables) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the starts and the entries of pairs, a chunk at a time."""
    chunks = (
        read_chunks(ImageSource(tables.made), 0, len(tables.made))
        if tables.search_offset is None
        else read_chunks(source, tables.search_offset, tables.search_bytes)
    )
    for chunk in chunks:
        numbers = memoryview(chunk).cast("i")
        yield numbers[::2].tolist(), numbers[1::2].tolist()


def _size(source: Source, elf: ElfFile, entry: int) -> int:
    at = find_offset(elf.loads, entry, _SIZE_AT + _SIZE.size)
    size: int = _SIZE.unpack(source.read(at + _SIZE_AT, _SIZE.size))[0]
    return size
