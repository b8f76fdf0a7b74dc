"""``otel-kprofiler diff``: compare two profiles, and mark differences that may be due to chance."""

import json
from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Any, Final

import click

from otel_kprofiler.analysis import Change, Filter, Part, Samples, compare, group_samples
from otel_kprofiler.cli import report
from otel_kprofiler.cli.diff_table import Way, as_dict, rate_of, summary, table
from otel_kprofiler.cli.moments import Moment, parse_moment
from otel_kprofiler.cli.no_match import check_matches
from otel_kprofiler.cli.output import Output, reveals_addresses
from otel_kprofiler.cli.profiles import load_profiles
from otel_kprofiler.cli.report import GROUPING, drop_idle, show, terminal_width
from otel_kprofiler.cli.sources import Choice, describe_source, is_table, load_table, outside_error
from otel_kprofiler.cli.types import ParsedType
from otel_kprofiler.clickhouse import PAGE, Need, need_of
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.formats import Interval, compared_columns, page
from otel_kprofiler.model import ProfileKind
from otel_kprofiler.text import escape_controls

_FILTERS: Final = frozenset(Filter.__dataclass_fields__)
_TOO_MUCH: Final = 1
_Range = tuple[Moment, Moment]
_UnixRange = tuple[int, int]


def _parse_range(text: str) -> _Range:
    start, between, end = text.partition("..")
    if not between:
        raise ValueError(f"{text!r} is not a range such as 0s..30s")
    return parse_moment(start), parse_moment(end)


_RANGE: Final = ParsedType("range", _parse_range)


@click.command(name="diff")
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="[AFTER]", required=False)
@click.option(
    "--by", type=GROUPING, default="function", show_default=True, metavar="WHAT",
    help="Group samples as `report --by` does.",
)  # fmt: skip
@click.option(
    "--per", type=click.Choice([way.value for way in Way]), default="samples", show_default=True,
    help="What to compare. samples: percentages of all samples. time: CPU time, waits or events "
    "per second.",
)  # fmt: skip
@click.option(
    "--time-before", type=_RANGE, metavar="FROM..TO",
    help="Time range within BEFORE. FROM and TO are offsets from the start, as in 0s..30s, or "
    "times that `report --from` accepts.",
)  # fmt: skip
@click.option(
    "--time-after", type=_RANGE, metavar="FROM..TO",
    help="Time range within AFTER, or within BEFORE if there is no AFTER.",
)  # fmt: skip
@click.option(
    "--fail-above", type=click.FloatRange(0), metavar="PERCENT",
    help="Exit with status 1 if a group's share of samples grew by more than PERCENT percentage "
    "points, unless the increase could be due to chance.",
)  # fmt: skip
@click.option(
    "-n", "--limit", type=click.IntRange(0), default=30, show_default=True,
    help="Maximum number of rows. 0 shows all rows.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "-o", "--output", "path", metavar="OUT.html",
    help="Write an HTML page with a differential flame graph instead of printing a table.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace OUT.html if it exists.")
def command(
    *,
    before: str,
    after: str | None,
    by: str,
    per: str,
    time_before: _Range | None,
    time_after: _Range | None,
    fail_above: float | None,
    limit: int,
    as_json: bool,
    path: str | None,
    force: bool,
    idle: bool,
    **filters: Any,
) -> None:
    """Compare the profiles BEFORE and AFTER, or two time ranges of one profile.

    \b
      otel-kprofiler diff before.otlp after.otlp
      otel-kprofiler diff --by syscall --process nginx before.otlp after.otlp
      otel-kprofiler diff -o change.html before.otlp after.otlp
      otel-kprofiler diff --time-before 0s..60s --time-after 60s..120s profile.otlp
      otel-kprofiler diff --time-before -2h..-1h --time-after -1h..-0s clickhouse://localhost/otel
      otel-kprofiler diff 'clickhouse://localhost/otel?service.version=1.2' \\
                          'clickhouse://localhost/otel?service.version=1.3'

    BEFORE and AFTER are files or ClickHouse addresses. The query string of an address may filter
    samples by attributes. Without a time range, the last hour in a ClickHouse table is used.
    Differences that may be due to chance are marked with ~. The filters are the same as for report.
    """  # noqa: D301 - \b keeps click from wrapping the paragraph
    if not after and not (time_before and time_after):
        raise click.UsageError(
            "pass two sources, or one source with two time ranges: --time-before, --time-after"
        )
    if path and as_json:
        raise click.UsageError("-o writes a page; to write JSON to a file, use --json > FILE")
    way, chosen = Way(per), Filter(**filters)
    need = (PAGE if path else need_of(chosen, by) | Need(times=True)) | need_of(chosen)
    first = second = _load(before, chosen, time_before, need, idle=idle)
    if after or is_table(before):
        second = _load(after or before, chosen, time_after, need, idle=idle)
    # Samples from tables have already been selected by time.
    time_first = None if is_table(before) else _resolve(first, time_before, "--time-before")
    time_second = (
        None if is_table(after or before) else _resolve(second, time_after, "--time-after")
    )
    check_matches(chosen, first, second)
    if set(first.kinds).isdisjoint(second.kinds):
        raise KProfilerError(
            "the profiles have no sample kind in common",
            hint=f"compare profiles of the same kind: BEFORE has {_list_kinds(first)}, and AFTER "
            f"has {_list_kinds(second)}",
        )
    compared = [
        (kind, parts, _compare(parts, by, way))
        for kind in first.kinds
        if kind in second.kinds
        for parts in [
            (_part(first, kind, chosen, time_first), _part(second, kind, chosen, time_second))
        ]
        if any(part.samples.count for part in parts)
    ]
    if path:
        names = [describe_source(name) for name in (before, after) if name]
        sides = names if len(set(names)) > 1 else ["before", "after"]
        intervals = [
            _interval(sides[0], first, chosen, time_first),
            _interval(sides[1], second, chosen, time_second),
        ]
        _write_page(path, intervals, " → ".join(dict.fromkeys(names)), force=force)
    elif as_json:
        kinds = [as_dict(kind, *parts, changes) for kind, parts, changes in compared]
        click.echo(json.dumps({"by": by, "per": way, "kinds": kinds}, indent=1))
    else:
        width = terminal_width()
        lines: list[str] = []
        for kind, parts, changes in compared:
            lines += summary(kind, *parts, changes, way)
            if changes:
                lines += table(by, changes[: limit or None], kind, way, width)
            if limit and len(changes) > limit:
                lines.append(f"{len(changes) - limit:,} more; --limit 0 shows all")
        show(lines or ["neither side has samples"])
    if fail_above is not None and any(
        change.is_changed and _gain(kind, change, way, rate_of(parts[0])) > fail_above / 100
        for kind, parts, changes in compared
        for change in changes
    ):
        raise click.exceptions.Exit(_TOO_MUCH)


command.params += [
    parameter for parameter in report.command.params if parameter.name in (*_FILTERS, "idle")
]


def _list_kinds(samples: Samples) -> str:
    kinds = (f"{kind.name} ({kind.unit})" for kind in samples.kinds)
    return escape_controls(", ".join(kinds)) or "none"


def _compare(parts: tuple[Part, Part], by: str, way: Way) -> list[Change]:
    """Compares two profiles; fractions are not compared if either profile has no samples."""
    if way is Way.SAMPLES and not all(part.samples.count for part in parts):
        return []
    return compare(*parts, partial(group_samples, by=by), per_second=way is Way.TIME)


def _load(source: str, chosen: Filter, times: _Range | None, need: Need, *, idle: bool) -> Samples:
    """Loads the samples from a source, within ``times`` if the source is a table."""
    if is_table(source):
        samples = load_table(source, Choice(chosen, *(times or ())), need)
    else:
        samples = load_profiles([source])
    return drop_idle(samples, idle=idle)


def _resolve(samples: Samples, times: _Range | None, option: str) -> _UnixRange | None:
    """Converts a range to Unix times in ns.

    Raises ``KProfilerError``, which names ``option``, if the range is empty or outside the profile.
    """
    if not times or not samples.times:
        return None
    first, last = min(samples.times), max(samples.times)
    start, end = (moment.unix_ns(first, last + 1) for moment in times)
    windows = samples.tables.origins
    begin = min(window.start_unix_ns for window in windows)
    if not start < end or end <= begin or start >= max(window.end_unix_ns for window in windows):
        raise outside_error(samples, option)
    return start, end


def _gain(kind: ProfileKind, change: Change, way: Way, rate: float) -> float:
    """Returns a group's growth as a fraction of all samples.

    With ``--per time``, returns a fraction of one CPU or, for events, of ``rate``, the number of
    events per second before.
    """
    gain = max(change.own.change, change.total.change)
    if way is Way.SAMPLES:
        return gain
    whole = 1e9 if kind.is_time else rate
    return gain / whole if whole else inf


def _write_page(path: str, intervals: Sequence[Interval], title: str, *, force: bool) -> None:
    windows = [window for interval in intervals for window in interval.windows]
    with Output(path, "html", force=force) as output:
        written = page(compared_columns(intervals, title=title))
        output.write_content(written, private=reveals_addresses(windows))


def _interval(name: str, samples: Samples, chosen: Filter, times: _UnixRange | None) -> Interval:
    part = _cut(samples, samples.kinds, chosen, times)
    return Interval(name, part.samples.windows(), part.start_ns, part.end_ns)


def _part(samples: Samples, kind: ProfileKind, chosen: Filter, times: _UnixRange | None) -> Part:
    return _cut(samples.of_kind(kind), [kind], chosen, times)


def _cut(
    samples: Samples, kinds: Sequence[ProfileKind], chosen: Filter, times: _UnixRange | None
) -> Part:
    windows = [origin for origin in samples.tables.origins if origin.profile.kind in kinds]
    start = min(window.start_unix_ns for window in windows)
    end = max(window.end_unix_ns for window in windows)
    if times:
        start = max(start, times[0])
        end = max(start + 1, min(end, times[1]))
        samples = samples.between(start, end)
    return Part(chosen.apply(samples), start, end)
