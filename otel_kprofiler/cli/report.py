"""``otel-kprofiler report``: show the contents of saved profiles."""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import click

from otel_kprofiler.analysis import (
    GROUPINGS,
    LOCK_GROUPINGS,
    PART,
    SORTS,
    TRACE,
    WAIT_GROUPINGS,
    Filter,
    Samples,
    find_span_parts,
    find_span_times,
    weigh_latency,
)
from otel_kprofiler.cli.moments import MOMENT, Moment
from otel_kprofiler.cli.named import named_parameters
from otel_kprofiler.cli.no_match import check_function, check_matches
from otel_kprofiler.cli.output import Output
from otel_kprofiler.cli.report_text import (
    Report,
    span_part_lines,
    span_parts_as_dict,
    span_time_lines,
    span_times_as_dict,
)
from otel_kprofiler.cli.sources import Choice, is_table, load_choice
from otel_kprofiler.cli.terminal import describe_count, say
from otel_kprofiler.cli.types import CPU_LIST, ParsedType
from otel_kprofiler.clickhouse import ALL, need_of
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.formats import FORMATS
from otel_kprofiler.model import LOCK_CONTENTION

_FORMATS: Final = [row.name for row in FORMATS]
_LATENCY: Final = "latency"
_OF_SPANS: Final = (PART, TRACE)
_OF_TABLES: Final = frozenset({"by", "callers_of", "callees_of", "limit", "order", "as_json"})
"""Parameters without an effect on files."""
_OF_KERNEL_FRAMES: Final = ("syscall", "bpf")
_GROUPINGS: Final = ", ".join([*GROUPINGS, *_OF_SPANS])


def _parse_grouping(name: str) -> str:
    if name not in (*GROUPINGS, *_OF_SPANS) and "." not in name and ":" not in name:
        raise ValueError(
            f"{name!r} is not a grouping: use one of {_GROUPINGS}, an attribute name "
            f"that contains a dot, or label:{name} for a label"
        )
    return name


GROUPING: Final = ParsedType("grouping", _parse_grouping)
"""The Click type for groupings: a name, ``label:NAME``, or an attribute name with a dot."""


@click.command(name="report")
@click.argument("paths", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "--by", type=GROUPING, default="function", show_default=True, metavar="WHAT",
    help=f"Group samples by one of {_GROUPINGS}, an attribute such as k8s.pod.name, or label:NAME.",
)  # fmt: skip
@click.option(
    "--callers", "callers_of", metavar="FUNCTION", help="Show the callers of this function."
)
@click.option(
    "--callees", "callees_of", metavar="FUNCTION", help="Show the callees of this function."
)
@click.option(
    "--weight", type=click.Choice(["time", _LATENCY]), default="time", show_default=True,
    help="Weight of the samples. time: CPU time. latency: CPU time divided by the number of "
    "the process's threads that were running at the time.",
)  # fmt: skip
@click.option(
    "-n", "--limit", type=click.IntRange(0), default=40, show_default=True,
    help="Maximum number of rows. 0 shows all rows.",
)  # fmt: skip
@click.option(
    "--sort", "order", type=click.Choice(list(SORTS)),
    help="Order of the rows. Default: total for lines, and self otherwise.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "-o", "--output", "path", metavar="OUT",
    help="Instead of printing the samples, write them to OUT in a format that record supports.",
)  # fmt: skip
@click.option(
    "-f", "--format", "form", type=click.Choice(_FORMATS),
    help="Format of OUT. By default, the suffix of OUT selects the format.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option(
    "--from", "start", type=MOMENT, metavar="TIME",
    help="Keep only samples taken at or after this time: 10s (after the start), -10s (before the "
    "end), 12:30:05 or 2026-01-31T12:30:05 (UTC).",
)  # fmt: skip
@click.option(
    "--to", "end", type=MOMENT, metavar="TIME",
    help="Keep only samples taken before this time.",
)  # fmt: skip
@click.option(
    "-p", "--process", "processes", multiple=True, metavar="NAME|PID",
    help="Keep only this process.",
)  # fmt: skip
@click.option(
    "-t", "--thread", "--comm", "threads", multiple=True, metavar="NAME|TID",
    help="Keep only this thread.",
)  # fmt: skip
@click.option(
    "--container", "containers", multiple=True, metavar="NAME|ID",
    help="Keep only the container with this name or ID prefix.",
)  # fmt: skip
@click.option(
    "--service", "services", multiple=True, metavar="NAME", help="Keep only this service."
)
@click.option(
    "--attribute", "attributes", multiple=True, metavar="NAME=VALUE",
    help="Keep only processes with this attribute, or samples with this label.",
)  # fmt: skip
@click.option(
    "--cpus", type=CPU_LIST, default=(), metavar="LIST",
    help="Keep only these CPUs, such as 0-3,8.",
)  # fmt: skip
@click.option(
    "--module", "modules", multiple=True, metavar="NAME",
    help="Keep only stacks with frames in this kernel module.",
)  # fmt: skip
@click.option(
    "--function", "functions", multiple=True, metavar="NAME",
    help="Keep only stacks with this function.",
)  # fmt: skip
@click.option(
    "--span", "spans", multiple=True, metavar="ID",
    help="Keep only the span or trace with this ID or ID prefix.",
)  # fmt: skip
@click.option(
    "--endpoint", "endpoints", multiple=True, metavar="NAME",
    help="Keep only spans under the local root span with this name, such as 'GET /orders/{id}'.",
)  # fmt: skip
@click.option(
    "--kind", "kinds", multiple=True, metavar="NAME", help="Keep only samples of this kind."
)
@click.option(
    "--side", "sides", multiple=True, metavar="NAME",
    help="Keep only frames of this type: kernel, user, python or jvm. Time in callees of "
    "other types counts as self time.",
)  # fmt: skip
@click.option(
    "--idle", is_flag=True,
    help="Also show waits in which a thread has no work to do: poll, accept, sleep, and waits in "
    "idle kernel threads.",
)  # fmt: skip
def command(
    *,
    paths: tuple[str, ...],
    by: str,
    callers_of: str | None,
    callees_of: str | None,
    weight: str,
    limit: int,
    order: str | None,
    as_json: bool,
    path: str | None,
    form: str | None,
    force: bool,
    start: Moment | None,
    end: Moment | None,
    sides: tuple[str, ...],
    idle: bool,
    **filters: Any,
) -> None:
    """Show the contents of profiles from any profiler. Multiple SOURCEs are merged.

    A SOURCE is a file, or a database that a Collector writes to, given as
    clickhouse://HOST:PORT/DATABASE.

    \b
      otel-kprofiler report profile.otlp
      otel-kprofiler report --by syscall --process nginx profile.otlp
      otel-kprofiler report --callers vfs_read profile.otlp
      otel-kprofiler report --module ext4 -o ext4.html profile.otlp
      otel-kprofiler report --service shop --from -1h clickhouse://localhost:8123/otel

    Filters may be repeated. A sample must match at least one value of each filter. Names may be
    patterns such as 'ext4_*'.
    """  # noqa: D301 - \b keeps click from wrapping the paragraph
    if callers_of and callees_of:
        raise click.UsageError("--callers cannot be combined with --callees")
    chosen, is_written = Filter(**filters), bool(path or form)
    weigh = _choose_weight(weight, paths, by)
    if by in _OF_SPANS:
        if is_written or callers_of or callees_of or sides:
            raise click.UsageError(
                f"--by {by} prints a table of spans; omit -o, -f, --callers, --callees and --side"
            )
        _report_spans(paths, by, Choice(chosen, start, end), limit, as_json=as_json)
        return
    if is_written:
        _refuse_settings_of_tables()
    if sides and by in _OF_KERNEL_FRAMES and not (callers_of or callees_of):
        raise click.UsageError(f"--by {by} groups by kernel frames of all samples; omit --side")
    of_stacks = bool(callers_of or callees_of or sides)
    need = ALL if is_written else need_of(chosen, by, of_stacks=of_stacks)
    loaded, samples = load_choice(paths, Choice(chosen, start, end, sides), need, weigh)
    check_matches(chosen, loaded)
    for option, function in (("--callers", callers_of), ("--callees", callees_of)):
        if function:
            check_function(option, function, samples)
    if is_written:
        with Output(path or "-", form, force=force) as output:
            of_threads = replace(
                chosen, processes=(), services=(), containers=(), attributes=(), threads=()
            )
            is_whole = of_threads == Filter() and not sides
            output.write(samples.windows(), idle=idle, has_whole_threads=is_whole)
        return
    # Exact totals exist only for whole windows.
    processes = None if start or end else chosen.find_processes(loaded)
    report = Report(processes, by, callers_of, callees_of, idle=idle, order=order)
    parts = [(kind, part) for kind in samples.kinds if (part := samples.of_kind(kind))]
    if by in WAIT_GROUPINGS:  # other sample kinds lack these attributes
        parts = [(kind, part) for kind, part in parts if part.has_waits] or parts
    if by in LOCK_GROUPINGS:
        parts = [(kind, part) for kind, part in parts if kind == LOCK_CONTENTION] or parts
    if as_json:
        document = {"by": by, "kinds": [report.as_dict(*part) for part in parts]}
        click.echo(json.dumps(document, indent=1))
        return
    width = terminal_width()
    lines = [line for part in parts for line in report.lines(*part, limit, width)]
    show(lines or ["no samples match" if samples.tables.stacks else "no samples"])


def _refuse_settings_of_tables() -> None:
    """Reject options that would have no effect on a file."""
    for parameter in named_parameters():
        if parameter.name in _OF_TABLES:
            raise click.UsageError(
                f"{parameter.opts[0]} applies to printed tables, and -o and -f write the samples; "
                "to write only the samples with a function, use --function"
            )


def _choose_weight(
    weight: str, paths: Sequence[str], by: str
) -> Callable[[Samples], Samples] | None:
    if weight != _LATENCY:
        return None
    if by in _OF_SPANS:
        raise click.UsageError(f"--weight {weight} cannot be combined with --by {by}")
    if any(map(is_table, paths)):
        raise click.UsageError(
            f"--weight {weight} needs all threads of a process, so it cannot be used on a table in "
            "ClickHouse; export the samples to a file first: report -o FILE.otlp"
        )
    return weigh_latency


def _report_spans(
    paths: Sequence[str], by: str, choice: Choice, limit: int, *, as_json: bool
) -> None:
    """Print a breakdown of the time in spans, after loading all samples from the spans' threads."""
    chosen = choice.chosen
    around = replace(chosen, spans=(), endpoints=(), functions=(), modules=())
    loaded, every = load_choice(paths, choice._replace(chosen=around), need_of(chosen, by))
    check_matches(chosen, loaded)
    if not any(every.tables.links):
        raise KProfilerError(
            f"--by {by} needs samples with spans, but no sample belongs to a span",
            hint="let the service publish its spans (docs/spans.md) or profile itself "
            "(docs/embedding.md), and record its waits, too: see docs/off-cpu.md",
        )
    width = terminal_width()
    document: dict[str, Any]
    if by == PART:
        parts = find_span_parts(chosen.apply(every), every)
        document, lines = span_parts_as_dict(parts), span_part_lines(parts, width)
    else:
        times = find_span_times(chosen.apply(every), every)
        document, lines = span_times_as_dict(times), span_time_lines(times, limit, width)
    if as_json:
        click.echo(json.dumps(document, indent=1))
    else:
        show(list(lines))


def drop_idle(samples: Samples, *, idle: bool) -> Samples:
    """Drops idle threads' waits from the samples, and prints a note if it dropped any."""
    kept = samples if idle else samples.without_idle()
    if left := samples.count - kept.count:
        say(f"{describe_count(left, 'idle wait')} left out; --idle shows them", err=True)
    return kept


def show(lines: Sequence[str]) -> None:
    """Prints lines, through a pager if the terminal has too few rows."""
    text = "".join(f"{line}\n" for line in lines)
    if sys.stdout.isatty() and len(lines) >= shutil.get_terminal_size().lines:
        click.echo_via_pager(text)
    else:
        click.echo(text, nl=False)


def terminal_width() -> int | None:
    """Returns the terminal's width in columns; None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
