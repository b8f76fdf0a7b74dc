"""Counts of the files whose symbols are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class LoaderCounts(NamedTuple):
    """Outcomes of the files that code was sampled in, at one instant.

    Attributes:
        loaded: read, also if they were evicted later.
        refused: damaged, too large or unreadable. A file counts once, however often it is tried;
            so it does in ``gone`` and in each reason of ``lines_refused``.
        dropped: not read because too many waited; read later if they are still needed.
        evicted: forgotten to make space.
        gone: needed after that, and not opened: no visible process maps them any more, and no file
            at their path is the same. Tried later and later.
        pending: not read yet.
        bytes: memory of the tables now.
        cpu_ns: time of this process's thread spent on it.
        lines_refused: files of the loaded ones whose source lines cannot be read, by reason.
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
