"""Writes a table of functions with their percentages of samples, as plain text."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final, NamedTuple

from otel_kprofiler.formats.entries import Entry, stack_entries
from otel_kprofiler.formats.weights import mixed_kinds, unit_of
from otel_kprofiler.model import ON_CPU, Profile, ProfileKind, Stack, Window
from otel_kprofiler.text import cut, describe_count, escape_controls

_NUMBERS: Final = 17  # "  12.3%   45.6%  "
_MODULE: Final = 16


class Row(NamedTuple):
    """A row in the table: a function and its samples.

    Attributes:
        function: name; ``fun_`` and an address; or the reason why frames in the module have no
            name.
        module: name of the function's module; ``kernel``, ``user`` or ``python`` if unknown.
        self_count: total value of the samples whose leaf frame is the function.
        total_count: total value of the samples that contain the function anywhere in the stack;
            each sample is counted once.
    """

    function: str
    module: str
    self_count: int
    total_count: int


def function_rows(profiles: Iterable[Profile]) -> list[Row]:
    """Returns the functions in profiles of the same kind, ordered by self count.

    If the profiles have different periods, counts are in the unit of the kind's ``measure``.
    """
    profiles = list(profiles)
    mixed = mixed_kinds(profiles)

    @cache
    def keys(stack: Stack) -> tuple[tuple[str, str] | None, frozenset[tuple[str, str]]]:
        entries = [_key(entry) for entry in stack_entries(stack)]
        return (entries[-1] if entries else None), frozenset(entries)

    self_weights: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    for profile in profiles:
        factor = profile.measure(1) if profile.kind in mixed else 1
        for _, sample in profile.samples:
            weight = sample.weight * factor
            leaf, functions = keys(sample.stack)
            if leaf:
                self_weights[leaf] += weight
            for key in functions:
                total[key] += weight
    rows = [Row(*key, self_weights[key], count) for key, count in total.items()]
    return sorted(rows, key=lambda row: (-row.self_count, -row.total_count, row[:2]))


def table(windows: Iterable[Window], *, width: int = 80, limit: int | None = 40) -> str:
    """Returns the functions with the most samples, one line each, at most ``width`` columns wide.

    Long names are shortened in the middle, numbers never. Each sample kind has a separate table.
    ``width`` must be at least 40. ``limit`` is the maximum number of functions; None for all.
    """
    by_kind: dict[ProfileKind, list[Profile]] = {}
    for window in windows:
        for profile in window.profiles:
            by_kind.setdefault(profile.kind, []).append(profile)
    tables = {
        kind: _table(kind, profiles, width, limit)
        for kind, profiles in (by_kind or {ON_CPU: []}).items()
    }
    if len(tables) == 1:
        return next(iter(tables.values()))
    return "\n".join(f"{kind.name}\n{text}" for kind, text in tables.items())


def _table(kind: ProfileKind, profiles: Sequence[Profile], width: int, limit: int | None) -> str:
    is_mixed = bool(mixed_kinds(profiles))
    count = sum(
        profile.measure(profile.weight) if is_mixed else profile.weight for profile in profiles
    )
    whole = count or 1  # avoids division by zero
    rows = function_rows(profiles)
    shown = rows[:limit]
    names = max(width, 40) - _NUMBERS - _MODULE - 2
    lines = [f"{'self':>7} {'total':>7}  {'function':<{names}}  module"]
    lines += [
        f"{row.self_count / whole:7.1%} {row.total_count / whole:7.1%}  "
        f"{_cut(row.function, names):<{names}}  {_cut(row.module, _MODULE)}"
        for row in shown
    ]
    rest = len(rows) - len(shown)
    unit = kind.unit if is_mixed else unit_of(kind)
    functions = describe_count(len(rows), "function")
    weight = describe_count(count, "sample") if unit == "samples" else f"{count:,} {unit}"
    lines += [f"{weight}, {functions}" + (f", {rest:,} not shown" * bool(rest))]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _key(entry: Entry) -> tuple[str, str]:
    place = entry.module or entry.side.name
    if entry.reason and not entry.name.startswith(("[truncated", "[no ", "fun_")):
        return f"[{entry.reason}]", place
    return entry.name, place


def _cut(text: str, width: int) -> str:
    return cut(escape_controls(text), width)
