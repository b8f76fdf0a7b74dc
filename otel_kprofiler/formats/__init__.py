"""Writes profiles in output formats: text and graphics for people, and files for other tools."""

from otel_kprofiler.formats.columns import (
    About,
    FrameRow,
    Interval,
    assemble,
    choose_bin_ms,
    columns,
    compared_columns,
    frame_row,
    wait_rows,
)
from otel_kprofiler.formats.entries import (
    Entry,
    frame_entries,
    process_id,
    process_name,
    side_remarks,
    stack_entries,
)
from otel_kprofiler.formats.firefox import firefox
from otel_kprofiler.formats.folded import folded
from otel_kprofiler.formats.html import SpanTime, html, page
from otel_kprofiler.formats.pprof import pprof
from otel_kprofiler.formats.pprof_read import is_pprof, parse_pprof
from otel_kprofiler.formats.registry import FORMATS, OutputFormat
from otel_kprofiler.formats.select import leave_out_idle, module_names, plain_module, select_modules
from otel_kprofiler.formats.speedscope import speedscope
from otel_kprofiler.formats.table import function_rows, table
from otel_kprofiler.formats.thread_dump import describe_ns, dump_folded, dump_json, dump_table

__all__ = [
    "FORMATS",
    "About",
    "Entry",
    "FrameRow",
    "Interval",
    "OutputFormat",
    "SpanTime",
    "assemble",
    "choose_bin_ms",
    "columns",
    "compared_columns",
    "describe_ns",
    "dump_folded",
    "dump_json",
    "dump_table",
    "firefox",
    "folded",
    "frame_entries",
    "frame_row",
    "function_rows",
    "html",
    "is_pprof",
    "leave_out_idle",
    "module_names",
    "page",
    "parse_pprof",
    "plain_module",
    "pprof",
    "process_id",
    "process_name",
    "select_modules",
    "side_remarks",
    "speedscope",
    "stack_entries",
    "table",
    "wait_rows",
]
