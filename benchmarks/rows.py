"""Defines the type of a benchmark result: one row of the table printed by ``make bench``."""

from typing import NamedTuple


class Row(NamedTuple):
    """One measurement.

    ``ratio`` compares two values measured in the same run, because absolute times vary on a shared
    machine. ``goal`` is the limit that the value, or the ratio, should satisfy.
    """

    what: str
    measured: str
    beside: str = ""
    ratio: float | None = None
    goal: str = ""
