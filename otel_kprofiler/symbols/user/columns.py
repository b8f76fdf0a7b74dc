"""Stores columns of function tables in memory or in temporary files.

A lookup touches only a few pages of a table. The remaining pages of a file-backed table are page
cache, which the kernel can reclaim; anonymous memory would remain in use until the table is
evicted.
"""

import logging
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from mmap import ACCESS_READ, PAGESIZE, mmap
from typing import IO, Final, NamedTuple

from otel_kprofiler.errors import describe_error

MIN_MAPPED_BYTES: Final = 128 << 10
"""Smaller tables are not mapped, because a page fault maps up to 64 KiB around the page."""

_STRIDE: Final = 1024  # integers per page
_WRITTEN_BYTES: Final = 16 << 10
"""Bytes per write. Larger writes may create larger folios, which a page fault maps entirely."""

_log = logging.getLogger(__name__)


class NamedCode(NamedTuple):
    """The columns of named functions, sorted by start.

    Attributes:
        starts: start of each function, as an offset from the table's base.
        sizes: size of each function in bytes, at least 1.
        names_at: offset of each name in ``names``, where each name ends with a zero byte.
        ranks: rank of each name; among names at the same start, the lowest rank is preferred.
    """

    starts: Sequence[int]
    sizes: Sequence[int]
    names_at: Sequence[int]
    names: bytes | bytearray | mmap
    ranks: Sequence[int]


def move_to_file(named: NamedCode, *others: Sequence[int]) -> tuple[NamedCode, list[Sequence[int]]]:
    """Copies columns to an unnamed temporary file, which is freed when it is unmapped.

    Returns the original columns if the file cannot be written. ``named`` must not be empty.
    """
    columns = named.starts, named.sizes, named.names_at, named.ranks, *others
    contents = [memoryview(column) for column in columns]  # type: ignore[arg-type] # buffers
    try:
        with tempfile.TemporaryFile() as file:
            places = [_append(file, content.cast("B")) for content in contents]
            end = _append(file, memoryview(named.names), PAGESIZE)
            file.flush()
            # Use only two mappings, because each mmap object keeps a file descriptor open.
            whole = memoryview(mmap(file.fileno(), end, access=ACCESS_READ))
            names = mmap(file.fileno(), len(named.names), access=ACCESS_READ, offset=end)
    except OSError as error:
        _log.info(
            "cannot move a symbol table to a temporary file (%s); keeping it in memory",
            describe_error(error),
        )
        return named, list(others)
    starts, sizes, names_at, ranks, *rest = (
        whole[at : at + content.nbytes].cast(content.format)  # type: ignore[call-overload]
        for at, content in zip(places, contents, strict=True)
    )
    return NamedCode(starts, sizes, names_at, names, ranks), rest


def _append(file: IO[bytes], content: memoryview, alignment: int = 8) -> int:
    start = -(-file.tell() // alignment) * alignment
    file.seek(start)
    for at in range(0, len(content), _WRITTEN_BYTES):
        file.write(content[at : at + _WRITTEN_BYTES])
    return start


def sample(starts: Sequence[int]) -> list[int]:
    """Returns every :data:`_STRIDE`-th item of a sorted column, for :func:`bisect_by`."""
    return list(starts[::_STRIDE])


def bisect_by(samples: list[int], starts: Sequence[int], offset: int) -> int:
    """Returns the number of items <= ``offset``, like ``bisect_right``.

    Reads a single page of the column, or searches the whole column if there are no samples.
    """
    if not samples:
        return bisect_right(starts, offset)
    following = bisect_right(samples, offset) * _STRIDE
    first = max(0, following - _STRIDE)
    return bisect_right(starts, offset, first, min(following, len(starts)))


def find_all(text: bytes | bytearray | mmap, wanted: bytes) -> Iterable[int]:
    """Yields each offset at which ``wanted`` occurs."""
    at = text.find(wanted)
    while at >= 0:
        yield at
        at = text.find(wanted, at + 1)
