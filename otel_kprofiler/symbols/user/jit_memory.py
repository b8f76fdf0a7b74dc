"""Memory of a process that may hold code it makes, and which of it has gone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from otel_kprofiler.host import MemoryMapping

Range = tuple[int, int]
"""Runtime addresses ``[start, end)``."""
_MEMORY: Final = ("/memfd:", "/dev/")
"""Files through which compilers map one memory twice, to write and to execute it."""


def find_memory(mappings: Iterable[MemoryMapping]) -> list[Range]:
    """Ranges without a file on disk, joined where they touch.

    Permissions do not count: compilers change those of code while they write it.

    Args:
        mappings: all of a process, by address.
    """
    ranges: list[Range] = []
    for mapping in mappings:
        if (
            mapping.path.startswith("/")
            and not mapping.deleted
            and not mapping.path.startswith(_MEMORY)
        ):
            continue
        if ranges and ranges[-1][1] == mapping.start:
            ranges[-1] = ranges[-1][0], mapping.end
        else:
            ranges.append((mapping.start, mapping.end))
    return ranges


def subtract(ranges: Iterable[Range], others: list[Range]) -> Iterator[Range]:
    """The parts of some ranges that are in none of others; both sorted and disjoint."""
    at = 0
    for start, end in ranges:
        while at < len(others) and others[at][1] <= start:
            at += 1
        following = at
        while start < end and following < len(others) and others[following][0] < end:
            if start < others[following][0]:
                yield start, others[following][0]
            start = others[following][1]  # noqa: PLW2901 - what is left of it
            following += 1
        if start < end:
            yield start, end
