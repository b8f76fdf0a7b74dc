"""Analyzes saved profiles: filters and groups samples, which are stored in columns."""

from otel_kprofiler.analysis.callers import ITSELF, NO_CALLER, callees, callers
from otel_kprofiler.analysis.comparison import Amount, Change, Part, compare
from otel_kprofiler.analysis.filters import Filter, matcher
from otel_kprofiler.analysis.groups import (
    CONTAINER,
    GROUPINGS,
    LABEL,
    LOCK_GROUPINGS,
    SERVICE,
    SORTS,
    WAIT_GROUPINGS,
    Group,
    endpoints,
    group_samples,
    merge_groups,
    select_group,
    sort_groups,
)
from otel_kprofiler.analysis.latency import LATENCY, weigh_latency
from otel_kprofiler.analysis.lock_summary import LockSummary, sum_locks, summarize_locks
from otel_kprofiler.analysis.occurrences import NO_PROGRAM, NO_STACK, OF_STACKS, Key
from otel_kprofiler.analysis.samples import Origin, Samples, load_samples
from otel_kprofiler.analysis.sides import select_sides
from otel_kprofiler.analysis.span_parts import (
    PART,
    TRACE,
    SpanParts,
    SpanTime,
    find_endpoint_parts,
    find_span_parts,
    find_span_times,
)
from otel_kprofiler.analysis.spans import endpoints_of_spans, spans_with_lines
from otel_kprofiler.analysis.wait_summary import WaitSummary, summarize_waits

__all__ = [
    "CONTAINER",
    "GROUPINGS",
    "ITSELF",
    "LABEL",
    "LATENCY",
    "LOCK_GROUPINGS",
    "NO_CALLER",
    "NO_PROGRAM",
    "NO_STACK",
    "OF_STACKS",
    "PART",
    "SERVICE",
    "SORTS",
    "TRACE",
    "WAIT_GROUPINGS",
    "Amount",
    "Change",
    "Filter",
    "Group",
    "Key",
    "LockSummary",
    "Origin",
    "Part",
    "Samples",
    "SpanParts",
    "SpanTime",
    "WaitSummary",
    "callees",
    "callers",
    "compare",
    "endpoints",
    "endpoints_of_spans",
    "find_endpoint_parts",
    "find_span_parts",
    "find_span_times",
    "group_samples",
    "load_samples",
    "matcher",
    "merge_groups",
    "select_group",
    "select_sides",
    "sort_groups",
    "spans_with_lines",
    "sum_locks",
    "summarize_locks",
    "summarize_waits",
    "weigh_latency",
]
