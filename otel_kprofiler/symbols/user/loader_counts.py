"""Counts of files by the outcome of reading their symbols."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class LoaderCounts(NamedTuple):
    """Outcomes for files with sampled code, at one instant.

    Attributes:
        loaded: read, even if evicted later.
        refused: damaged, too large or unreadable. A file counts once, regardless of the number of
            attempts; this also applies to ``gone`` and to each reason in ``lines_refused``.
        dropped: not read because the queue was full; requested again if still needed.
        evicted: dropped from memory to make room for others.
        gone: needed again but not reopened, since no visible process maps them and the files at
            their paths differ; retried at growing intervals.
        pending: waiting to be read.
        bytes: memory of all tables.
        cpu_ns: CPU time that this process spent on reading, in nanoseconds.
        lines_refused: loaded files whose source lines cannot be read, by reason.
    """

    loaded: int
    refused: int
    dropped: int
    evicted: int
    gone: int
    pending: int
    bytes: int
    cpu_ns: int
    lines_refused: Mapping[str, int]
