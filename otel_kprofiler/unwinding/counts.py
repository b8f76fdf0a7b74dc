"""Counts the outcomes of requests for unwind tables."""

from collections.abc import Mapping
from typing import NamedTuple

from otel_kprofiler.unwinding.refusal import Refusal


class TableCounts(NamedTuple):
    """Counts of requests for unwind tables, all taken at the same instant.

    Attributes:
        requested: number of requests since the start, including refused and pending ones.
        evicted: number of tables removed to free space.
        tables: number of tables currently loaded in the kernel.
        bytes: kernel memory used by the loaded tables.
        cpu_ns: CPU time that this process's threads spent on requests.
    """

    requested: int
    loaded: int
    refused: Mapping[Refusal, int]
    pending: int
    evicted: int
    tables: int
    bytes: int
    cpu_ns: int

    def as_dict(self) -> dict[str, object]:
        """Returns the counts as plain values for JSON."""
        refused = {reason.name.lower(): count for reason, count in self.refused.items()}
        return {**self._asdict(), "refused": refused}
