"""Finds and verifies the tables that the BPF program reads: the search table and ``.eh_frame``.

``.eh_frame_hdr`` consists of a 12-byte header and a sorted table of pairs: the start of a function
and its entry in ``.eh_frame``, each as a signed 32-bit distance from the address of
``.eh_frame_hdr`` (Linux Standard Base, "Exception Frames"). Both the search table and ``.eh_frame``
are copied unchanged. The BPF program checks every bound again, because the file may change between
this check and the copy.
"""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from otel_kprofiler.elf import ElfFile, Source, find_offset
from otel_kprofiler.model import Segment
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused

ENTRY_BYTES: Final = 8
"""Size of a pair in the search table, in bytes."""
MAX_ENTRIES: Final = 1 << 22
"""Maximum number of entries for the BPF program's binary search. A browser has about 600,000
entries."""
MAX_FRAMES_BYTES: Final = 0x0FFF0000
"""Maximum size of ``.eh_frame``. The BPF program stores positions in ``.eh_frame`` in 28 bits."""

# DW_EH_PE_*: the encodings that all current linkers use.
_ENCODINGS: Final = bytes([1, 0x1B, 0x03, 0x3B])
"""Version, then the encodings of the pointer to ``.eh_frame``, the count, and the pairs."""
_OMITTED: Final = 0xFF
_HEADER: Final = struct.Struct("<4xiI")
_LENGTH: Final = struct.Struct("<I")
_LENGTH_IS_64_BITS: Final = 0xFFFFFFF0
_ALIGNMENT: Final = 8
_CHUNK_BYTES: Final = 64 * 1024  # bytes of pairs checked at a time, to save memory


class Tables(NamedTuple):
    """Locations of a file's search table and ``.eh_frame``.

    Attributes:
        origin: base address (SVMA) to which the pairs are relative.
        search_offset: offset of the pairs in the file; None if the pairs are in ``made``.
        frames: ``.eh_frame`` up to the end of the last entry that the pairs refer to.
        made: generated pairs; empty if the pairs are in the file.
        made_frames: generated ``.eh_frame`` entries, which follow the file's entries.
    """

    origin: int
    search_offset: int | None
    entries: int
    frames: Segment
    made: bytes = b""
    made_frames: bytes = b""

    @property
    def search_bytes(self) -> int:
        """Returns the size of the search table in bytes."""
        return self.entries * ENTRY_BYTES

    @property
    def made_at(self) -> int:
        """Returns the offset of ``made_frames`` from the first entry of ``frames``, in bytes."""
        return (self.frames.size + _ALIGNMENT - 1) & -_ALIGNMENT

    @property
    def frames_bytes(self) -> int:
        """Returns the size of all entries in bytes."""
        return self.made_at + len(self.made_frames) if self.made_frames else self.frames.size


def find_tables(source: Source, elf: ElfFile) -> Tables | None:
    """Finds and checks the tables; None if the file has no search table.

    Raises :class:`TableRefused` if the tables are not usable, or ``ElfError`` if they are not in
    the file.
    """
    if elf.search is None:
        return None
    origin, size = elf.search
    at = find_offset(elf.loads, origin, size)
    head = source.read(at, min(size, _HEADER.size))
    if not _has_pairs(head):
        return None
    relative, entries = _HEADER.unpack(head)
    if not entries:
        return None
    if entries > MAX_ENTRIES:
        raise TableRefused(Refusal.TOO_LARGE, f"the search table lists {entries} functions")
    if _HEADER.size + entries * ENTRY_BYTES > size:
        raise TableRefused(Refusal.OUT_OF_BOUNDS, f"{entries} functions do not fit in {size} bytes")
    search = at + _HEADER.size
    address = origin + len(_ENCODINGS) + relative
    lowest, highest = check_pairs(read_chunks(source, search, entries * ENTRY_BYTES))
    if origin + lowest < address:
        raise TableRefused(Refusal.OUT_OF_BOUNDS, "an entry points before .eh_frame")
    frames = _frames_until(source, elf.loads, address, origin + highest)
    return Tables(origin, search, entries, frames)


def check_pairs(chunks: Iterator[bytes]) -> tuple[int, int]:
    """Returns the lowest and highest entry offsets.

    Raises :class:`TableRefused` if the pairs are unsorted.
    """
    last = lowest = highest = None
    for chunk in chunks:
        numbers = memoryview(chunk).cast("i")
        starts = numbers[::2].tolist()
        entries = numbers[1::2].tolist()
        if starts != sorted(starts) or (last is not None and starts[0] < last):
            raise TableRefused(Refusal.NOT_SORTED)
        last = starts[-1]
        low, high = min(entries), max(entries)
        lowest = low if lowest is None else min(lowest, low)
        highest = high if highest is None else max(highest, high)
    if lowest is None or highest is None:
        raise TableRefused(Refusal.NO_FRAMES, "the search table is empty")
    return lowest, highest


def _has_pairs(head: bytes) -> bool:
    """Returns whether pairs follow a header. Rejects encodings that linkers do not emit."""
    if head.startswith(_ENCODINGS) and len(head) == _HEADER.size:
        return True
    if len(head) < len(_ENCODINGS) or head[0] != _ENCODINGS[0] or _OMITTED not in head[2:4]:
        raise TableRefused(Refusal.ENCODING, head[: len(_ENCODINGS)].hex())
    return False


def read_chunks(source: Source, offset: int, size: int) -> Iterator[bytes]:
    """Yields search table pairs from a file, in chunks. Raises ``ElfError`` if a read fails."""
    for start in range(0, size, _CHUNK_BYTES):
        yield source.read(offset + start, min(_CHUNK_BYTES, size - start))


def _frames_until(source: Source, loads: tuple[Segment, ...], address: int, last: int) -> Segment:
    at = find_offset(loads, last, _LENGTH.size)
    (length,) = _LENGTH.unpack(source.read(at, _LENGTH.size))
    if length >= _LENGTH_IS_64_BITS:
        raise TableRefused(Refusal.ENCODING, "an entry has a 64-bit length")
    size = last + _LENGTH.size + length - address
    if size > MAX_FRAMES_BYTES:
        raise TableRefused(Refusal.TOO_LARGE, f".eh_frame occupies {size} bytes")
    return Segment(find_offset(loads, address, size), size, address)
