"""Formats the output of ``diff`` as text or as JSON-serializable values."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Final

import click

from otel_kprofiler.analysis import Amount, Change, Part
from otel_kprofiler.cli.columns import Column, layout
from otel_kprofiler.cli.report_table import FRAMES
from otel_kprofiler.model import ProfileKind
from otel_kprofiler.text import describe_count, escape_controls

_MAX_PLACE: Final = 32
_MS: Final = 1e6
_SIMILAR: Final = 1.5
"""If the profiles' loads differ by more than this factor, the summary reports a changed load."""
_CHANCE: Final = "~"


class Way(StrEnum):
    """The quantity to compare: fractions of all samples, or weights per second."""

    SAMPLES = "samples"
    TIME = "time"


def summary(
    kind: ProfileKind, before: Part, after: Part, changes: Sequence[Change], way: Way
) -> Iterator[str]:
    """Yields the summary's lines: the compared profiles, and the number of changed groups."""
    rates = rate_of(before), rate_of(after)
    sides = " -> ".join(
        _describe_side(kind, part, rate) for part, rate in zip((before, after), rates, strict=True)
    )
    compared = "percentage of all samples" if way is Way.SAMPLES else "weight per second"
    changed = sum(change.is_changed for change in changes)
    yield f"{escape_controls(kind.name)}: {sides}, by {compared}"
    if not before.samples.count or not after.samples.count:
        side = "after" if before.samples.count else "before"
        yield f"the {side} side has no samples" + (
            "; --per time compares the other side with zero" if way is Way.SAMPLES else ""
        )
    elif way is Way.SAMPLES and max(rates) > _SIMILAR * min(rates):
        yield "the load itself changed, which shares do not show: compare it with --per time"
    if changed:
        count = f"{changed:,} of {len(changes):,}"
        yield f"{count} changed by more than chance; the others are marked {_CHANCE}"
    elif changes:
        yield f"nothing changed by more than chance ({len(changes):,} compared)"


def rate_of(part: Part) -> float:
    """Returns the total weight per second."""
    return sum(part.samples.weights()) * 1e9 / (part.end_ns - part.start_ns)


def _describe_side(kind: ProfileKind, part: Part, rate: float) -> str:
    shown = rate / _MS if kind.is_time else rate
    seconds = (part.end_ns - part.start_ns) / 1e9
    samples = describe_count(part.samples.count, "sample")
    return f"{samples} in {seconds:.1f} s ({shown:,.1f} {_per_second(kind)})"


def table(
    by: str, changes: Sequence[Change], kind: ProfileKind, way: Way, width: int | None
) -> list[str]:
    """Returns a table of changes as lines, header first; ``by`` is the grouping."""

    def text(value: float, sign: str = "") -> str:
        if way is Way.SAMPLES:
            return f"{value:{sign}.2%}"
        if kind.is_time:
            return f"{value / _MS:{sign}.2f}"
        return f"{value:{sign},.1f}"

    unit = "" if way is Way.SAMPLES else f" {_per_second(kind)}"
    self_amounts = [change.own for change in changes]
    columns = [
        Column("", [" " if change.is_changed else _CHANCE for change in changes], 10),
        Column(f"change{unit}", [text(amount.change, "+") for amount in self_amounts], 9),
        Column("±", [text(amount.margin) for amount in self_amounts], 5),
        Column("before", [text(amount.before) for amount in self_amounts], 7),
        Column("after", [text(amount.after) for amount in self_amounts], 7),
    ]
    if by in FRAMES:
        columns[1] = Column(f"self change{unit}", columns[1].cells, 9)
        total = [change.total for change in changes]
        columns.append(Column("total change", [text(amount.change, "+") for amount in total], 8))
    if any(change.key.place for change in changes):
        places = [escape_controls(change.key.place)[:_MAX_PLACE] for change in changes]
        columns.append(Column("in", places, 4, is_text=True))
    names = [escape_controls(change.key.name) for change in changes]
    columns.append(Column(by, names, 10, is_text=True))
    head, *rows = layout(columns, width)
    return [
        click.style(head, bold=True),
        *(
            click.style(row, fg="red" if change.own.change > 0 else "green")
            if change.is_changed
            else click.style(row, dim=True)
            for change, row in zip(changes, rows, strict=True)
        ),
    ]


def as_dict(
    kind: ProfileKind, before: Part, after: Part, changes: Sequence[Change]
) -> dict[str, Any]:
    """Returns the comparison of all groups as plain values for JSON."""
    return {
        "kind": kind.name,
        "unit": kind.measure[1],
        "before": _side(before),
        "after": _side(after),
        "groups": [
            {
                "name": change.key.name,
                "place": change.key.place or None,
                "changed": change.is_changed,
                "self": _amount(change.own),
                "total": _amount(change.total),
            }
            for change in changes
        ],
    }


def _side(part: Part) -> dict[str, int]:
    return {
        "samples": part.samples.count,
        "start_unix_ns": part.start_ns,
        "end_unix_ns": part.end_ns,
    }


def _amount(amount: Amount) -> dict[str, float]:
    return {**amount._asdict(), "change": amount.change}


def _per_second(kind: ProfileKind) -> str:
    return "ms/s" if kind.is_time else "/s"
