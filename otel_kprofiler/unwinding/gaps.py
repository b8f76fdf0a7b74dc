"""Finds code without unwind rules, such as musl's code in a statically linked program."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from otel_kprofiler.elf import ElfFile, Source, find_offset, read_dynamic_linker
from otel_kprofiler.unwinding.table import Tables, read_chunks

Gap = tuple[int, int]
"""Start and end of a range of code."""

_FAR_BYTES: Final = 4096
"""Minimum distance of functions to search for gaps between them: reading sizes takes time."""
_LEAST_BYTES: Final = 1024
"""Minimum total size of gaps that justify a process; linkers leave about 200 bytes in each file."""
_PADDING: Final = 64
_MAX_GAPS: Final = 1024
_PAIR: Final = struct.Struct("<ii")
_SIZE_AT: Final = 12
"""Offset of the function's size in an entry with 32-bit pointers, as linkers write them."""
_SIZE: Final = struct.Struct("<I")


def find_gaps(source: Source, elf: ElfFile, tables: Tables | None) -> list[Gap]:
    """Finds ranges of code without rules, ascending; none if they do not justify a process.

    Args:
        source: content of the file.
        elf: the file's parsed headers.
        tables: the file's existing tables.

    Raises:
        ElfError: the file cannot be read.
    """
    if tables is not None and not elf.entry:
        return []  # a library with tables
    gaps = [gap for gap in _find(source, elf, tables) if gap[1] - gap[0] > _PADDING]
    is_large = sum(end - start for start, end in gaps) >= _LEAST_BYTES
    if tables is not None:
        # musl's entry point has no unwind rule. Other files' gaps, such as assembly and the
        # functions that V8 embeds, are not worth a wait for the tables that the file has.
        lacks_entry = any(start <= elf.entry < end for start, end in gaps)
        is_large = lacks_entry and (is_large or bool(read_dynamic_linker(source)))
    return gaps[:_MAX_GAPS] if is_large else []


def _find(source: Source, elf: ElfFile, tables: Tables | None) -> Iterator[Gap]:
    covered = list(_covered(source, elf, tables)) if tables else []
    for text in elf.texts:
        at, text_end = text.address, text.address + text.size
        for start, end in covered:
            if text.address <= start < text_end:
                yield at, start
                at = max(at, end)
        yield at, text_end


def _covered(source: Source, elf: ElfFile, tables: Tables) -> Iterator[Gap]:
    """Yields ranges of functions that are close to each other."""
    origin, program_entry = tables.origin, elf.entry - tables.origin
    first: int | None = None
    last = last_entry = 0
    for start, entry in _pairs(source, tables):
        if first is None:
            first = start
        elif start - last > _FAR_BYTES or last <= program_entry < start:
            yield origin + first, origin + last + _size(source, elf, origin + last_entry)
            first = start
        last, last_entry = start, entry
    if first is not None:
        yield origin + first, origin + last + _size(source, elf, origin + last_entry)


def _pairs(source: Source, tables: Tables) -> Iterator[tuple[int, int]]:
    """Yields the search table: starts of a function and of its entry, relative to the origin."""
    if tables.search_offset is None:
        yield from _PAIR.iter_unpack(tables.made)
        return
    for chunk in read_chunks(source, tables.search_offset, tables.search_bytes):
        yield from _PAIR.iter_unpack(chunk)


def _size(source: Source, elf: ElfFile, entry: int) -> int:
    """Reads the size of an entry's function."""
    at = find_offset(elf.loads, entry, _SIZE_AT + _SIZE.size)
    size: int = _SIZE.unpack(source.read(at + _SIZE_AT, _SIZE.size))[0]
    return size
