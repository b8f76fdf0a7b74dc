"""Formats the ``report`` tables, for terminals of any width and for pipes."""

from collections.abc import Mapping, Sequence
from typing import Final

import click

from otel_kprofiler.analysis import PART, Group, Key
from otel_kprofiler.cli.columns import Column, layout
from otel_kprofiler.text import cut, escape_controls

FRAMES: Final = frozenset({"function", "line", "module"})
"""Groupings in which a sample counts towards the group of each of its frames."""

_PLACES: Final = {
    "function": "module",
    "callers": "module",
    "callees": "module",
    "thread": "process",
    "bpf": "program",
    "span": "trace",
}
"""Title of the ``Key.place`` column (such as ``module`` for functions), by grouping."""
_WITHOUT_KERNEL: Final = frozenset(
    {"function", "callers", "callees", "module", "syscall", "bpf", PART}
)
_MIN_PLACE: Final = 12
_MAX_PLACE: Final = 32
_NOTEWORTHY: Final = 0.05


def table(
    by: str,
    groups: Sequence[Group],
    whole: int,
    unit: str,
    *,
    width: int | None,
    endpoints: Mapping[Key, str],
) -> list[str]:
    """Returns a table of groups as lines, header first.

    ``whole`` is the total weight, which corresponds to 100 %. Nanoseconds are shown as
    milliseconds. ``endpoints`` maps spans to the names of their local root spans.
    """
    measured, share = unit_name(unit), [group.total / (whole or 1) for group in groups]
    if by in FRAMES:
        columns = [
            Column(f"self {measured}", [amount(group.own, unit) for group in groups], 2),
            Column("self", [f"{group.own / (whole or 1):.1%}" for group in groups], 9),
            Column(f"total {measured}", [amount(group.total, unit) for group in groups], 1),
            Column("total", [f"{part:.1%}" for part in share], 8),
        ]
    else:
        columns = [
            Column(measured, [amount(group.total, unit) for group in groups], 6),
            Column("share", [f"{part:.1%}" for part in share], 9),
            Column("samples", [f"{group.samples:,}" for group in groups], 1),
        ]
    if by == "line":
        columns[:2] = [
            Column(f"kernel {measured}", [amount(group.kernel, unit) for group in groups], 3),
            Column("kernel", [f"{group.kernel / (whole or 1):.1%}" for group in groups], 9),
            Column("self", [f"{group.own / (whole or 1):.1%}" for group in groups], 7),
        ]
    elif by not in _WITHOUT_KERNEL:
        shares = [f"{group.kernel / (group.own or 1):.0%}" for group in groups]
        columns.insert(2, Column("kernel", shares, 5))
    if by in _PLACES:
        columns.append(_text_column(_PLACES[by], [group.key.place for group in groups], 4, width))
    if endpoints:
        roots = [endpoints.get(group.key, "-") for group in groups]
        columns.append(_text_column("endpoint", roots, 7, width))
    names = [escape_controls(group.key.name) for group in groups]
    head, *rows = layout([*columns, Column(by, names, 10, is_text=True)], width)
    return [
        click.style(head, bold=True),
        *(
            click.style(row, bold=True) if part >= _NOTEWORTHY else row
            for row, part in zip(rows, share, strict=True)
        ),
    ]


def _text_column(title: str, texts: Sequence[str], keep: int, width: int | None) -> Column:
    shown = list(map(escape_controls, texts))
    if width:
        room = max(_MIN_PLACE, min(_MAX_PLACE, width // 3))
        shown = [cut(text, room) for text in shown]
    return Column(title, shown, keep, is_text=True)


def amount(weight: int, unit: str) -> str:
    """Formats a weight without its unit, converting nanoseconds to milliseconds."""
    return f"{weight / 1e6:,.1f}" if unit == "nanoseconds" else f"{weight:,}"


def unit_name(unit: str) -> str:
    """Returns the unit in which :func:`amount` formats weights."""
    return {"nanoseconds": "ms"}.get(unit, unit)
