"""Formats the output of ``report`` as tables, or as plain values for JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import click

from otel_kprofiler.analysis import (
    PART,
    TRACE,
    Group,
    Key,
    LockSummary,
    Samples,
    SpanParts,
    SpanTime,
    WaitSummary,
    callees,
    callers,
    endpoints_of_spans,
    group_samples,
    sort_groups,
    spans_with_lines,
    summarize_locks,
    summarize_waits,
)
from otel_kprofiler.cli.columns import Column, layout
from otel_kprofiler.cli.completeness import Completeness
from otel_kprofiler.cli.report_table import amount, table, unit_name
from otel_kprofiler.model import ProfileKind, WaitState
from otel_kprofiler.text import describe_count, escape_controls

_LINES_OF_SPAN: Final = 3
_NS: Final = "nanoseconds"


@dataclass(frozen=True, slots=True)
class Report:
    """The settings of a report, which shows samples of one kind in groups.

    Attributes:
        processes: whether each Resource was selected, by index; None if the filters select only
            some samples from a process, for which exact wait totals do not exist.
        by: a name in :data:`GROUPINGS`, or the name of an attribute.
        callers_of, callees_of: function whose callers or callees are shown; None to group by
            ``by``.
        order: a name in :data:`SORTS`; None for the grouping's default.
    """

    processes: Sequence[bool] | None
    by: str
    callers_of: str | None = None
    callees_of: str | None = None
    idle: bool = False
    order: str | None = None

    def lines(
        self, kind: ProfileKind, samples: Samples, limit: int, width: int | None
    ) -> Iterator[str]:
        """Yields a report on the samples, as text with up to ``limit`` rows (0: all)."""
        every, samples = samples, self._shown(samples)
        function = self.callers_of or self.callees_of
        unit, whole = kind.unit, sum(samples.weights())
        yield _summary(kind, samples, whole, every)
        yield from self._beside(kind, every, samples)
        if not samples:
            return
        groups, lines_of_spans = self._sorted(samples)
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
        """Returns the report, with all groups, as plain values for JSON."""
        every, samples = samples, self._shown(samples)
        groups, lines_of_spans = self._sorted(samples)
        endpoints = self._endpoints(samples)
        summary = summarize_waits(every, kind, self.processes)
        locks = summarize_locks(every, kind, self.processes)
        return {
            "kind": kind.name,
            "unit": kind.measure[1],
            "samples": samples.count,
            "total": sum(samples.weights()),
            "start_unix_ns": min(every.times),
            "end_unix_ns": max(every.times) + 1,
            "lost": _lost(kind, samples),
            **({"waits": _waits_as_dict(summary, every, samples)} if summary else {}),
            **({"locks": _locks_as_dict(locks)} if locks else {}),
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

    def _shown(self, samples: Samples) -> Samples:
        return samples if self.idle else samples.without_idle()

    def _beside(self, kind: ProfileKind, every: Samples, shown: Samples) -> Iterator[str]:
        """Yields lines about exact wait totals, incomplete stacks and hidden samples."""
        unit = kind.unit
        if summary := summarize_waits(every, kind, self.processes):
            by_samples = f"by samples {amount(summary.estimate_ns, unit)}"
            if summary.error_ns is None:
                by_samples += f" ms, without the {_lost(kind, every):,} lost samples"
            else:
                by_samples += f" ± {amount(summary.error_ns, unit)} ms"
            if summary.exact is None:
                yield f"these waits: {by_samples}"
            else:
                states = ", ".join(
                    f"{state.label} {amount(part, unit)}"
                    for state, part in zip(WaitState, summary.exact.by_state, strict=True)
                    if part
                )
                exact = amount(summary.exact.total_ns, unit)
                yield f"all waits: {exact} ms exactly ({states or 'none'}); {by_samples}"
        if locks := summarize_locks(every, kind, self.processes):
            yield f"all {describe_locks(locks)}"
        if remark := Completeness.of_samples(shown).remark():
            yield escape_controls(remark)
        if left := every.count - shown.count:
            weight = sum(every.weights()) - sum(shown.weights())
            yield (
                f"idle waits, not shown without --idle: {left:,} "
                f"sample{'s' * (left != 1)}, {amount(weight, unit)} {unit_name(unit)}"
            )

    def _sorted(self, samples: Samples) -> tuple[Sequence[Group], dict[Group, list[Group]]]:
        groups, lines_of_spans = self._groups(samples)
        return sort_groups(groups, self.order) if self.order else groups, lines_of_spans

    def _groups(self, samples: Samples) -> tuple[Sequence[Group], dict[Group, list[Group]]]:
        """Returns the groups and, if grouped by span, the groups of source lines in each span."""
        if self.callers_of:
            return callers(samples, self.callers_of), {}
        if self.callees_of:
            return callees(samples, self.callees_of), {}
        if self.by == "span":
            spans = dict(spans_with_lines(samples))
            return list(spans), spans
        return group_samples(samples, self.by), {}

    def _endpoints(self, samples: Samples) -> Mapping[Key, str]:
        """Returns the local root span's name for each span; empty if not grouped by span."""
        is_span = self.by == "span" and not self.callers_of and not self.callees_of
        return endpoints_of_spans(samples) if is_span else {}


def span_part_lines(span_parts: SpanParts, width: int | None) -> Iterator[str]:
    """Yields a breakdown of the time in spans, as lines that fit the terminal's width."""
    if not span_parts.parts:
        yield "no sample in a span matches"
        return
    whole = sum(part.own for part in span_parts.parts)
    traces = describe_count(span_parts.traces, "trace")
    yield f"{traces}, {amount(whole, _NS)} ms on threads"
    yield from table(PART, span_parts.parts, whole, _NS, width=width, endpoints={})


def span_parts_as_dict(span_parts: SpanParts) -> dict[str, Any]:
    """Returns a breakdown of the time in spans, as plain values for JSON."""
    return {
        "by": PART,
        "unit": _NS,
        "traces": span_parts.traces,
        "total": sum(part.own for part in span_parts.parts),
        "groups": list(map(_as_dict, span_parts.parts)),
    }


def span_time_lines(times: Sequence[SpanTime], limit: int, width: int | None) -> Iterator[str]:
    """Yields a line with the time of each span, up to ``limit`` spans; 0 shows all spans."""
    if not times:
        yield "no sample in a span matches"
        return
    traces = describe_count(len({row.trace_id for row in times}), "trace")
    whole = sum(row.total for row in times)
    spans = describe_count(len(times), "span")
    yield f"{traces}, {spans}, {amount(whole, _NS)} ms on threads"
    shown = times[: limit or None]
    names = [escape_controls(row.endpoint) or "-" for row in shown]
    columns = [
        Column("user ms", [amount(row.user, _NS) for row in shown], 6),
        Column("kernel ms", [amount(row.kernel, _NS) for row in shown], 7),
        Column("waited ms", [amount(row.waited, _NS) for row in shown], 5),
        Column("service", [escape_controls(row.service) for row in shown], 4, is_text=True),
        Column("endpoint", names, 3, is_text=True),
        Column("trace", [row.trace_id for row in shown], 1, is_text=True),
        Column("span", [row.span_id for row in shown], 2, is_text=True),
    ]
    head, *lines = layout(columns, width)
    yield click.style(head, bold=True)
    yield from lines
    if len(times) > len(shown):
        yield f"{len(times) - len(shown):,} more; --limit 0 shows all"


def span_times_as_dict(times: Sequence[SpanTime]) -> dict[str, Any]:
    """Returns the time spent in each span, as plain values for JSON."""
    return {"by": TRACE, "unit": _NS, "spans": [row._asdict() for row in times]}


def _summary(kind: ProfileKind, samples: Samples, whole: int, every: Samples) -> str:
    first, last = min(every.times), max(every.times)
    if first == last:  # a single sample, or a file without times, such as pprof
        windows = [every.tables.origins[origin] for origin in set(every.origins)]
        first = min(window.start_unix_ns for window in windows)
        last = max(window.end_unix_ns for window in windows)
    start = datetime.fromtimestamp(first / 1e9, tz=UTC)
    parts = [
        f"{escape_controls(kind.name)}: {samples.count:,} sample{'s' * (samples.count != 1)}",
        f"{amount(whole, kind.unit)} {unit_name(kind.unit)}",
        f"{(last - first) / 1e9:.1f} s from {start:%Y-%m-%d %H:%M:%S} UTC",
        f"{_lost(kind, samples):,} lost",
    ]
    return ", ".join(parts)


def _lost(kind: ProfileKind, samples: Samples) -> int:
    profiles = [origin.profile for origin in samples.tables.origins]
    return sum(sum(profile.lost.values()) for profile in profiles if profile.kind == kind)


def _waits_as_dict(summary: WaitSummary, every: Samples, shown: Samples) -> dict[str, Any]:
    exact = summary.exact
    states = zip(WaitState, exact.by_state, strict=True) if exact else ()
    return {
        "exact_ns": {state.label: part for state, part in states if part} if exact else None,
        "switches": exact and exact.switches,
        "below_ns": exact and exact.below_ns,
        "estimate_ns": summary.estimate_ns,
        "standard_error_ns": summary.error_ns,
        "threshold_ns": summary.threshold_ns,
        "idle_samples": every.count - shown.count,
        "idle_ns": sum(every.weights()) - sum(shown.weights()),
    }


def describe_locks(locks: LockSummary) -> str:
    """Describes the exact number and total duration of waits for locks, by type of lock."""
    types = ", ".join(
        f"{escape_controls(name)} {amount(total.total_ns, _NS)} ms in {total.waits:,}"
        for name, total in locks.exact.items()
    )
    waits = f"{describe_count(locks.waits, 'wait')} for locks"
    text = f"{waits}: {amount(locks.total_ns, _NS)} ms exactly ({types or 'none'})"
    return f"{text}; {locks.uncounted:,} not counted" if locks.uncounted else text


def _locks_as_dict(locks: LockSummary) -> dict[str, Any]:
    return {
        "exact": {name: total._asdict() for name, total in locks.exact.items()},
        "uncounted": locks.uncounted,
    }


def _as_dict(group: Group) -> dict[str, Any]:
    return {
        "name": group.key.name,
        "place": group.key.place or None,
        "self": group.own,
        "total": group.total,
        "kernel": group.kernel,
        "samples": group.samples,
    }
