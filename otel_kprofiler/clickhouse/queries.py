"""Builds SQL queries for the table of the Collector's ClickHouse exporter.

Each row of the table is an OTLP sample, which combines samples that differ only in time. Queries
select samples by their exact times. The sort key ends in ``Timestamp``, the start of a profile,
so an additional condition on this column allows the server to skip most other rows.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from otel_kprofiler.clickhouse.conditions import literal, literals
from otel_kprofiler.clickhouse.need import Need
from otel_kprofiler.model import SIDES
from otel_kprofiler.otlp import STACK_STATUS, STREAM_ID, WAIT_CAUSE, WAIT_STATE, WINDOW_PREFIX

_LONGEST_PROFILE_NS: Final = 3_600_000_000_000
"""A profile with samples in a time range begins at most this long before the range."""
KIND: Final = "SampleType, SampleUnit, PeriodType, PeriodUnit, Period"
_STACK: Final = "Addresses, FunctionNames, FileNames, LineNumbers, MappingFileNames"
STACK_ID: Final = f"cityHash64({_STACK})"
KERNEL_MAPPINGS: Final = r"^(vmlinux|\[kernel.*|bpf_(prog|trampoline|dispatcher)_.*)$"
"""Matches the names of mappings that contain only kernel code. Kernel module names are excluded,
because user-space binaries may have the same names.
"""
KERNEL_FLOOR: Final = 1 << 63
"""Lowest kernel address, which identifies kernel code in frames without a mapping."""
_IN_KERNEL: Final = (
    f"arrayExists((name, address) -> match(name, {literal(KERNEL_MAPPINGS)}) "
    f"OR name = '' AND address >= {KERNEL_FLOOR}, MappingFileNames, Addresses)"
)


class Range(NamedTuple):
    """A range of Unix times in nanoseconds. The end is exclusive."""

    start_ns: int
    end_ns: int


def first_time(table: str) -> str:
    """Returns a query for the time of the first sample, which is 0 if there are no samples."""
    first = f"SELECT min(Timestamp) FROM {table}"  # noqa: S608
    start = "toUInt64(toUnixTimestamp64Nano(Timestamp))"
    return (
        f"SELECT min(if(empty(TimestampsUnixNano), {start}, arrayMin(TimestampsUnixNano))) "  # noqa: S608
        f"FROM {table} WHERE Timestamp <= ({first}) + INTERVAL 1 HOUR"
    )


def rows_between(table: str, times: Range) -> str:
    """Returns the table and a ``WHERE`` clause for profiles that may have samples in a range."""
    start, end = max(0, times.start_ns - _LONGEST_PROFILE_NS), times.end_ns
    return (
        f"{table} WHERE Timestamp >= fromUnixTimestamp64Nano(toInt64({start})) "
        f"AND Timestamp < fromUnixTimestamp64Nano(toInt64({end}))"
    )


def is_kind(kinds: Iterable[tuple[str, str, str, str, int]]) -> str:
    """Returns an SQL condition that selects samples of the given kinds."""
    listed = (f"({', '.join(map(literal, kind[:4]))}, {kind[4]})" for kind in kinds)
    return f"({KIND}) IN ({', '.join(listed)})"


def totals(rows: str, conditions: Sequence[str], times: Range) -> str:
    """Returns a query for the number of samples and the time span of each kind of profile."""
    return (
        f"SELECT {KIND}, sum(length(times)), "  # noqa: S608 - all parts are quoted
        "toUnixTimestamp64Nano(min(Timestamp)), "
        "max(toUnixTimestamp64Nano(Timestamp) + DurationNano) "
        f"FROM {_samples(rows, conditions, times)} GROUP BY ALL ORDER BY ALL"
    )


def samples(
    rows: str, conditions: Sequence[str], times: Range, need: Need, step_ns: int | None
) -> str:
    """Returns a query that reads samples, and merges those that are equal in all required fields.

    Columns: kind, Resource attributes, sample attributes, stack, link, number of samples, sum of
    the values, times and values. If times are not needed or a step is given, the times column
    contains only the first and last times, and the values column is empty.

    ``rows`` is the result of :func:`rows_between`. Only rows that satisfy all SQL ``conditions``
    are read. With ``step_ns``, only samples in the same interval of that length are merged.
    """
    # needed to omit waits by idle threads, as reports do by default
    always = {WAIT_STATE, WAIT_CAUSE}
    if need.stacks:
        always |= {STACK_STATUS.format(side.name) for side in SIDES}
    wanted = None if need.samples is None else need.samples | always
    columns = [
        KIND,
        f"{_attributes('ResourceAttributes', need.resources)} AS resource",
        f"{_attributes('SampleAttributes', wanted)} AS attributes",
        f"{STACK_ID if need.stacks else _IN_KERNEL} AS stack",
        "TraceId, SpanId" if need.links else "'' AS trace, '' AS span",
    ]
    source = _samples(rows, conditions, times)
    if need.times and step_ns:
        columns.append(f"intDiv(time, {step_ns}) AS step")
        merged = "count(), sum(value), [min(time), max(time)], []"
        source += " ARRAY JOIN times AS time, values AS value"
    elif need.times:
        merged = (
            "sum(length(times)), sum(arraySum(values)), groupArrayArray(times), "
            "if(arrayAll(value -> value = 1, groupArrayArray(values)), [], groupArrayArray(values))"
        )
    else:
        merged = (
            "sum(length(times)), sum(arraySum(values)), "
            "[min(arrayMin(times)), max(arrayMax(times))], []"
        )
    return f"SELECT {', '.join(columns)}, {merged} FROM {source} GROUP BY ALL"  # noqa: S608


def stacks(rows: str, conditions: Sequence[str], times: Range) -> str:
    """Returns a query for the distinct stacks: each stack's number and frames, leaf first."""
    frames = ", ".join(f"any({column})" for column in _STACK.split(", "))
    source = _samples(rows, conditions, times)
    return f"SELECT {STACK_ID} AS stack, {frames} FROM {source} GROUP BY stack"  # noqa: S608


def accounts(rows: str, kinds: Iterable[tuple[str, str, str, str, int]]) -> str:
    """Returns a query for the counts of samples taken and lost, by kind.

    Each row repeats the counts for its whole window, so only one row per window is counted.
    """
    stream = f"ProfileAttributes[{literal(STREAM_ID)}]"
    counts = (
        "mapApply((name, count) -> (name, toUInt64OrZero(count)), "
        f"mapFilter((name, count) -> startsWith(name, {literal(WINDOW_PREFIX)}), "
        "ProfileAttributes))"
    )
    windows = (
        f"SELECT {KIND}, Timestamp, DurationNano, {stream}, ResourceAttributes['host.name'], "  # noqa: S608
        f"any({counts}) AS counts FROM {rows} AND {is_kind(kinds)} "
        "AND notEmpty(ProfileAttributes) GROUP BY ALL"
    )
    return f"SELECT {KIND}, sumMap(counts) FROM ({windows}) GROUP BY ALL"  # noqa: S608


def _samples(rows: str, conditions: Sequence[str], times: Range) -> str:
    """Returns a subquery that drops the times outside a range, and their values, from each row.

    A row without timestamps gets its profile's start time, and is omitted if its values total 0.
    """
    all_times = "if(empty(TimestampsUnixNano), [start], TimestampsUnixNano)"
    all_values = (
        "if(empty(TimestampsUnixNano), [arraySum(Values)], "
        "arrayResize(Values, length(TimestampsUnixNano), toInt64(1)))"
    )
    is_inside = f"time >= {times.start_ns} AND time < {times.end_ns}"
    chosen = "".join(f" AND {condition}" for condition in conditions)
    return (
        "(SELECT *, toUInt64(toUnixTimestamp64Nano(Timestamp)) AS start, "  # noqa: S608
        f"arrayFilter(time -> {is_inside}, {all_times}) AS times, "
        f"arrayFilter((value, time) -> {is_inside}, {all_values}, {all_times}) AS values "
        f"FROM {rows}{chosen} AND (notEmpty(TimestampsUnixNano) OR arraySum(Values) != 0) "
        "AND notEmpty(times))"
    )


def _attributes(column: str, names: frozenset[str] | None) -> str:
    if names is None:
        return f"mapSort({column})"
    if not names:
        return "CAST(map(), 'Map(String, String)')"
    return f"mapSort(mapFilter((name, _) -> name IN ({literals(names)}), {column}))"
