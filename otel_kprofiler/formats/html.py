"""A flame graph as one HTML page that needs nothing from outside.

The page is built from ``viewer/`` by ``make viewer``; here only the data is put in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any, Final

from otel_kprofiler.formats.columns import columns
from otel_kprofiler.model import Window

_PLACE: Final = re.compile(r"\{\{(TITLE|SUMMARY|PROFILE|CONNECT)\}\}")


def html(windows: Iterable[Window], *, title: str = "") -> str:
    """The page, some 60 KB plus the data; opens from a file and makes no connections.

    Equal samples are one entry, so the page grows with the number of distinct stacks and moments.

    Args:
        windows: what to show.
        title: heading of the page, such as the command; the host is added.
    """
    return page(columns(windows, title=title))


def page(data: Mapping[str, Any], *, connects: bool = False) -> str:
    """The page with its data, or with its source.

    Args:
        data: of :func:`otel_kprofiler.formats.columns`; or ``{"source": PATH}``, from where the
            page fetches such data as JSON, with the query of its range bar.
        connects: whether the page may fetch from where it came; otherwise it connects nowhere.
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    values = {
        "TITLE": escape(data.get("title", "otel-kprofiler")),
        "SUMMARY": escape(data.get("summary", "")),
        "PROFILE": text.replace("<", "\\u003c"),  # so that no text can end the script element
        "CONNECT": "'self'" if connects else "'none'",
    }
    asset = files("otel_kprofiler.formats").joinpath("assets/flamegraph.html").read_text("utf-8")
    return _PLACE.sub(lambda match: values[match[1]], asset)
