"""Lists the output formats of ``record``, with their file suffixes and writers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from otel_kprofiler.formats.firefox import firefox
from otel_kprofiler.formats.folded import folded
from otel_kprofiler.formats.html import SpanTime, html
from otel_kprofiler.formats.otlp import otlp, otlp_lines
from otel_kprofiler.formats.pprof import pprof
from otel_kprofiler.formats.speedscope import speedscope
from otel_kprofiler.formats.table import table
from otel_kprofiler.model import Window


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """An output format for the ``record`` command.

    Attributes:
        name: value of ``--format``.
        suffix: file suffix, in lower case. If several suffixes match a file name, the longest one
            wins.
        write: returns the content of a file. Text is written as UTF-8.
        next_step: command that opens a file, with ``{}`` for the file's path.
        has_addresses: whether files may contain kernel addresses. Files with addresses are readable
            only by their owner.
        is_compressed: whether the content is already gzip-compressed.
        is_profile: whether the complete profile can be read back from a file.
        write_page: like ``write``, but with a heading and the time spent in spans; None for formats
            that have neither.
    """

    name: str
    suffix: str
    write: Callable[[Sequence[Window]], str | bytes]
    next_step: str
    has_addresses: bool = False
    other_suffixes: tuple[str, ...] = ()
    is_compressed: bool = False
    is_profile: bool = False
    write_page: Callable[[Sequence[Window], str, Sequence[SpanTime]], str] | None = None


FORMATS: Final = [
    OutputFormat(
        "html",
        ".html",
        html,
        "open {} in a browser",
        write_page=lambda windows, title, spans: html(windows, title=title, spans=spans),
    ),
    OutputFormat("otlp", ".otlp", otlp, "otel-kprofiler report {}", is_profile=True),
    OutputFormat(
        "otlp-json",
        ".otlp.jsonl",
        otlp_lines,
        "otel-kprofiler report {}",
        other_suffixes=(".json", ".jsonl"),
        is_profile=True,
    ),
    OutputFormat("folded", ".folded", folded, "flamegraph.pl {} > profile.svg"),
    OutputFormat("table", ".txt", table, "less -S {}"),
    OutputFormat(
        "pprof",
        ".pprof",
        pprof,
        "go tool pprof -http : {}",
        has_addresses=True,
        other_suffixes=(".pb",),
        is_compressed=True,
    ),
    OutputFormat("firefox", ".firefox.json", firefox, "open {} at https://profiler.firefox.com"),
    OutputFormat("speedscope", ".speedscope.json", speedscope, "open {} in speedscope"),
]
"""All formats, in the order in which ``record --help`` lists them."""
