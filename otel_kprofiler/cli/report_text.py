"""What `report` prints: tables for people, or plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import click

from otel_kprofiler.analysis import (
    Group,
    Key,
    Samples,
    callees,
    callers,
    endpoints_of_spans,
    find_grouping,
    spans_with_lines,
)
from otel_kprofiler.cli.report_table import amount, table, unit_name
from otel_kprofiler.model import ProfileKind
from otel_kprofiler.text import escape_controls

_LINES_OF_SPAN: Final = 3


@dataclass(frozen=True, slots=True)
class Report:
    """Samples of a kind in groups.

    Attributes:
        by: a name of :data:`GROUPINGS`, or of an attribute.
        callers_of: if not None, groups are the callers of this function instead.
        callees_of: likewise what it calls.
    """

    by: str
    callers_of: str | None = None
    callees_of: str | None = None

    def lines(
        self, kind: ProfileKind, samples: Samples, limit: int, width: int | None
    ) -> Iterator[str]:
        """The report as text.

        Args:
            kind: of all samples.
            samples: at least one.
            limit: number of rows, 0 for all.
            width: columns of the terminal; None for no limit.
        """
        groups, lines_of_spans = self._groups(samples)
        function = self.callers_of or self.callees_of
        unit, whole = kind.measure[1], sum(samples.weights())
        yield _summary(kind, samples, whole)
        if function:
            part = sum(group.own for group in groups)
            share = f"{part / whole:.1%}" if whole else "0"
            which = "callers" if self.callers_of else "callees"
            name = escape_controls(function)
            yield f"{which} of {name}: {amount(part, unit)} {unit_name(unit)}, {share} of all"
            whole = part
        shown = groups[: limit or None]
        by = "callers" if self.callers_of else "callees" if self.callees_of else self.by
        head, *rows = table(by, shown, whole, unit, width=width, endpoints=self._endpoints(samples))
        yield head
        for group, row in zip(shown, rows, strict=True):
            yield row
            for line in lines_of_spans.get(group, [])[:_LINES_OF_SPAN]:
                name = escape_controls(line.key.name)
                text = f"    {amount(line.own, unit)} {unit_name(unit)} in {name}"
                yield click.style(text[:width], dim=True)
        if len(groups) > len(shown):
            yield f"{len(groups) - len(shown):,} more; --limit 0 shows all"

    def as_dict(self, kind: ProfileKind, samples: Samples) -> dict[str, Any]:
        """The report as plain values, with all groups."""
        groups, lines_of_spans = self._groups(samples)
        endpoints = self._endpoints(samples)
        return {
            "kind": kind.name,
            "unit": kind.measure[1],
            "samples": samples.count,
            "total": sum(samples.weights()),
            "start_unix_ns": min(samples.times),
            "end_unix_ns": max(samples.times) + 1,
            "lost": _lost(kind, samples),
            "groups": [
                _as_dict(group)
                | ({"endpoint": endpoints[group.key]} if group.key in endpoints else {})
                | (
                    {"lines": list(map(_as_dict, lines_of_spans[group]))}
                    if group in lines_of_spans
                    else {}
                )
                for group in groups
            ],
        }

    def _groups(self, samples: Samples) -> tuple[Sequence[Group], dict[Group, list[Group]]]:
        """The groups; of spans also their lines."""
        if self.callers_of:
            return callers(samples, self.callers_of), {}
        if self.callees_of:
            return callees(samples, self.callees_of), {}
        if self.by == "span":
            spans = dict(spans_with_lines(samples))
            return list(spans), spans
        return find_grouping(self.by)(samples), {}

    def _endpoints(self, samples: Samples) -> Mapping[Key, str]:
        """Of spans, the names of their local roots."""
        is_span = self.by == "span" and not self.callers_of and not self.callees_of
        return endpoints_of_spans(samples) if is_span else {}


def _summary(kind: ProfileKind, samples: Samples, whole: int) -> str:
    first, last = min(samples.times), max(samples.times)
    start = datetime.fromtimestamp(first / 1e9, tz=UTC)
    parts = [
        f"{escape_controls(kind.name)}: {samples.count:,} sample{'s' * (samples.count != 1)}",
        f"{amount(whole, kind.measure[1])} {unit_name(kind.measure[1])}",
        f"{(last - first) / 1e9:.1f} s from {start:%Y-%m-%d %H:%M:%S} UTC",
        f"{_lost(kind, samples):,} lost",
    ]
    return ", ".join(parts)


def _lost(kind: ProfileKind, samples: Samples) -> int:
    """Samples that were lost before they reached the profile, of all processes."""
    profiles = [origin.profile for origin in samples.tables.origins]
    return sum(sum(profile.lost.values()) for profile in profiles if profile.kind == kind)


def _as_dict(group: Group) -> dict[str, Any]:
    return {
        "name": group.key.name,
        "place": group.key.place or None,
        "self": group.own,
        "total": group.total,
        "kernel": group.kernel,
        "samples": group.samples,
    }
