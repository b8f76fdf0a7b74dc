"""Counts files by the outcome of reading their symbols."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class LoaderCounts(NamedTuple):
    """Numbers of files with sampled code, by outcome. All numbers are from the same instant.

    Attributes:
        loaded: files that were read, even if evicted later.
        refused: files that are damaged, too large or unreadable. Retries are counted neither here
            nor in ``gone`` or ``lines_refused``.
        dropped: files that were not read because the queue was full. They are requested again if
            needed.
        evicted: files whose symbols were dropped from memory to make room for others.
        gone: files that could not be reopened, because no visible process maps them and their paths
            lead to other files. They are retried at growing intervals.
        pending: files waiting to be read.
        bytes: memory used by the symbol tables of all loaded files.
        cpu_ns: CPU time that this process spent on reading.
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
