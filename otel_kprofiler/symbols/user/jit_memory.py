"""Finds the memory of a process that may hold runtime-generated code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from otel_kprofiler.host import MemoryMapping

Range = tuple[int, int]
"""Runtime addresses ``[start, end)``."""
_MEMORY: Final = ("/memfd:", "/dev/")
"""Path prefixes of files that compilers map twice, to write and to execute code."""


def find_memory(mappings: Iterable[MemoryMapping]) -> list[Range]:
    """Returns the mapped ranges without a file on disk. Merges adjacent ranges.

    Ignores permissions, because compilers change them while they write code. Mappings must be
    sorted.
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
    """Yields the parts of ``ranges`` outside ``others``; both must be sorted and disjoint."""
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
