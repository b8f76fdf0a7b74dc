"""Writes a file's tables to an inner map in the format that the BPF program reads.

======================  ================  ====================================================
At                      Bytes             What
======================  ================  ====================================================
0                       256               ``struct table_header``, the rest zero
256                     8 per entry       the search table
rounded up to 16        .eh_frame's size  ``.eh_frame``
after that              at least 512      zero: the program reads a window at a time
======================  ================  ====================================================
"""

import struct
from typing import Final

from otel_kprofiler.bpf import PAGE_BYTES
from otel_kprofiler.elf import ElfFile, Source
from otel_kprofiler.model import Segment
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused
from otel_kprofiler.unwinding.table import Tables

MAX_TEXTS: Final = 4
_VERSION: Final = 1
_HEADER: Final = struct.Struct("=IIQQIIII")
_TEXT: Final = struct.Struct("=QQQ")  # offset, bytes, address minus offset
_ENTRY: Final = struct.Struct("=Q")
_ENTRY_AT: Final = _HEADER.size + MAX_TEXTS * _TEXT.size
_SEARCH_AT: Final = 256
_WINDOW_BYTES: Final = 512
_ALIGNMENT: Final = 16
_MASK: Final = (1 << 64) - 1


def image_pages(tables: Tables) -> int:
    """Returns the number of pages that the tables need."""
    return -(-(_frames_at(tables) + tables.frames_bytes + _WINDOW_BYTES) // PAGE_BYTES)


def check_texts(texts: tuple[Segment, ...]) -> None:
    """Raise :class:`TableRefused` if there are no segments, or too many for the header."""
    if not texts:
        raise TableRefused(Refusal.NO_TEXT)
    if len(texts) > MAX_TEXTS:
        raise TableRefused(Refusal.MANY_TEXTS, str(len(texts)))


def write_image(
    target: memoryview, source: Source, tables: Tables, elf: ElfFile, serial: int
) -> None:
    """Fill an inner map that consists of :func:`image_pages` zeroed pages.

    ``serial`` is the 32-bit serial number of the loaded tables. Raises ``ElfError`` if the file was
    truncated or cannot be read.
    """
    frames_at, frames = _frames_at(tables), tables.frames
    _HEADER.pack_into(
        target, 0, serial, _VERSION, tables.origin, frames.address, tables.entries, frames_at,
        tables.frames_bytes, len(elf.texts),
    )  # fmt: skip
    for index, text in enumerate(elf.texts):
        delta = text.address - text.offset & _MASK
        at = _HEADER.size + index * _TEXT.size
        _TEXT.pack_into(target, at, text.offset, text.size, delta)
    _ENTRY.pack_into(target, _ENTRY_AT, elf.entry)
    search = target[_SEARCH_AT : _SEARCH_AT + tables.search_bytes]
    if tables.search_offset is None:
        search[:] = tables.made
    else:
        source.read_into(search, tables.search_offset)
    source.read_into(target[frames_at : frames_at + frames.size], frames.offset)
    made_at = frames_at + tables.made_at
    target[made_at : made_at + len(tables.made_frames)] = tables.made_frames


def _frames_at(tables: Tables) -> int:
    return (_SEARCH_AT + tables.search_bytes + _ALIGNMENT - 1) & -_ALIGNMENT
