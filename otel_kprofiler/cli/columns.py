"""Lays out columns of text for terminals of any width."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from otel_kprofiler.text import cut

_MIN_LAST: Final = 16


class Column(NamedTuple):
    """A table column. On narrow terminals, columns with the lowest ``keep`` are omitted first."""

    title: str
    cells: Sequence[str]
    keep: int
    is_text: bool = False

    @property
    def width(self) -> int:
        """Returns the width of the widest cell."""
        return max(map(len, (self.title, *self.cells)))


def layout(columns: Sequence[Column], width: int | None) -> list[str]:
    """Returns a table's lines, header first, each of at most ``width`` columns (None: no limit)."""
    kept = list(columns)

    def used() -> int:
        return sum(column.width + 2 for column in kept[:-1])

    while width and len(kept) > 2 and used() + _MIN_LAST > width:
        kept.remove(min(kept, key=lambda column: column.keep))
    room = max(_MIN_LAST, width - used()) if width else None
    rows = [
        [column.title for column in kept],
        *zip(*(column.cells for column in kept), strict=True),
    ]
    return [_line(kept, row, room) for row in rows]


def _line(columns: Sequence[Column], cells: Iterable[str], room: int | None) -> str:
    *others, name = cells
    parts = [
        f"{cell:<{column.width}}" if column.is_text else f"{cell:>{column.width}}"
        for column, cell in zip(columns, others, strict=False)
    ]
    return "  ".join([*parts, cut(name, room) if room else name])
