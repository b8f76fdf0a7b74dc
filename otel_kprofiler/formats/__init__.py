"""Windows as text and pictures for people, and as files for other tools."""

from otel_kprofiler.formats.folded import folded
from otel_kprofiler.formats.html import html
from otel_kprofiler.formats.pprof import pprof
from otel_kprofiler.formats.registry import FORMATS, OutputFormat
from otel_kprofiler.formats.select import select_modules
from otel_kprofiler.formats.speedscope import speedscope
from otel_kprofiler.formats.table import Row, function_rows, table

__all__ = [
    "FORMATS",
    "OutputFormat",
    "Row",
    "folded",
    "function_rows",
    "html",
    "pprof",
    "select_modules",
    "speedscope",
    "table",
]
