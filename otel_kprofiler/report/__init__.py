"""Windows as text and pictures for people, and as files for other tools."""

from otel_kprofiler.report.folded import folded
from otel_kprofiler.report.html import html
from otel_kprofiler.report.pprof import pprof
from otel_kprofiler.report.select import select_modules
from otel_kprofiler.report.speedscope import speedscope
from otel_kprofiler.report.table import Row, function_rows, table

__all__ = [
    "Row",
    "folded",
    "function_rows",
    "html",
    "pprof",
    "select_modules",
    "speedscope",
    "table",
]
