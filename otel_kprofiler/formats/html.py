"""Writes a flame graph as one self-contained HTML page.

``make viewer`` builds the page from ``viewer/``, and this module only inserts the data.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, Final, NamedTuple

from otel_kprofiler.formats.columns import columns
from otel_kprofiler.model import Window
from otel_kprofiler.text import escape_controls

_PLACE: Final = re.compile(r"\{\{(TITLE|SUMMARY|PROFILE|CONNECT)\}\}")


class SpanTime(NamedTuple):
    """Time spent in spans across ``traces`` traces, divided into ``parts`` (ns), longest first.

    ``name`` is the name of the spans' local roots; empty for all spans.
    """

    name: str
    traces: int
    parts: Sequence[tuple[str, int]]


def html(windows: Iterable[Window], *, title: str = "", spans: Sequence[SpanTime] = ()) -> str:
    """Returns an HTML page of about 80 KB plus the data.

    The page can be opened from a file, and makes no network connections. Identical samples are
    merged, so the size grows with the number of distinct stacks and times. The host's name is added
    to ``title``. The first item of ``spans`` is the total over all spans.
    """
    data = columns(windows, title=title)
    if spans:
        data["spans"] = [span._replace(name=escape_controls(span.name))._asdict() for span in spans]
    return page(data)


def page(data: Mapping[str, Any], *, connects: bool = False) -> str:
    """Returns the page with its data embedded, or with the path from which to fetch the data.

    Args:
        data: result of :func:`otel_kprofiler.formats.columns`; or ``{"source": PATH}``, from which
            the page fetches that result as JSON, for the time range selected in the page's range
            bar.
        connects: whether the page may connect to its origin; it never connects elsewhere.
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    values = {
        "TITLE": escape(data.get("title", "otel-kprofiler")),
        "SUMMARY": escape(data.get("summary", "")),
        "PROFILE": text.replace("<", "\\u003c"),  # so that no string can end the script element
        "CONNECT": "'self'" if connects else "'none'",
    }
    asset = files("otel_kprofiler.formats").joinpath("assets/flamegraph.html").read_text("utf-8")
    return _PLACE.sub(lambda match: values[match[1]], asset)
