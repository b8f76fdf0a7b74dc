"""Outcomes of the requests for unwind tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from otel_kprofiler.unwinding.refusal import Refusal


class TableCounts(NamedTuple):
    """The outcomes of the requests, at one instant.

    Attributes:
        requested: since the start: loaded + refused + pending.
        loaded: answered with a table.
        refused: answered without, by reason.
        pending: not answered yet.
        evicted: tables removed to make space.
        tables: in the kernel now.
        bytes: that these take.
        cpu_ns: time of this process's threads spent on it.
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
        """As plain values, for JSON."""
        refused = {reason.name.lower(): count for reason, count in self.refused.items()}
        return {**self._asdict(), "refused": refused}
