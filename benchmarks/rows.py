"""The result of a benchmark: one row of the table that ``make bench`` prints."""

from typing import NamedTuple


class Row(NamedTuple):
    """One measured figure.

    ``ratio`` compares two things measured in the same run, because absolute times say little
    on a shared machine; ``goal`` is what the figure (or the ratio) should reach.
    """

    what: str
    measured: str
    beside: str = ""
    ratio: float | None = None
    goal: str = ""
