"""A flame graph as one HTML page that needs nothing from outside.

The page is built from ``viewer/`` by ``make viewer``; here only the data is put in: columns of
numbers that point into each other and into one list of strings (``viewer/src/profile.js`` names
them). Equal samples are one entry, so the page grows with the number of distinct stacks.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any, Final

from otel_kprofiler.formats.entries import Entry, process_id, process_name, stack_entries
from otel_kprofiler.formats.weights import Weighed, Weights
from otel_kprofiler.model import Stack, Window
from otel_kprofiler.text import describe_count, escape_controls

_PLACE: Final = re.compile(r"\{\{(TITLE|SUMMARY|PROFILE)\}\}")
_KINDS: Final = {"process": 0, "kernel": 1, "module": 2, "bpf": 3, "user": 4, "python": 5}
"""Colours of frames, as the page numbers them (KINDS in ``viewer/src/profile.js``)."""


def html(windows: Iterable[Window], *, title: str = "Flame graph") -> str:
    """The page, some 90 KB plus the data; opens from a file and makes no connections.

    Args:
        windows: what to show; all of them in one graph, by process name at the root.
        title: heading of the page.
    """
    windows = list(windows)
    seen = _Seen()
    for window in windows:
        seen.add(window)
    weights = Weights(windows)
    columns = _Columns(weights.unit)
    for weighed in weights.samples():
        columns.add(weighed)
    data = json.dumps(columns.as_json(), separators=(",", ":"), ensure_ascii=False)
    values = {
        "TITLE": escape(escape_controls(title)),
        "SUMMARY": escape(seen.text()),
        "PROFILE": data.replace("<", "\\u003c"),  # so that no text can end the script element
    }
    page = files("otel_kprofiler.formats").joinpath("assets/flamegraph.html").read_text("utf-8")
    return _PLACE.sub(lambda match: values[match[1]], page)


class _Seen:
    """What the page says about the recording as a whole."""

    def __init__(self) -> None:
        self._samples = self._lost = self._start_ns = self._end_ns = 0
        self._rates: set[int] = set()
        self._cpus: set[int] = set()

    def add(self, window: Window) -> None:
        self._samples += window.sample_count
        self._lost += sum(sum(profile.lost.values()) for profile in window.profiles)
        self._start_ns = min(self._start_ns or window.start_unix_ns, window.start_unix_ns)
        self._end_ns = max(self._end_ns, window.end_unix_ns)
        self._rates |= {round(1e9 / one.period_ns) for one in window.profiles if one.period_ns}
        self._cpus |= {sample.cpu for _, sample in window.samples}

    def text(self) -> str:
        if not self._samples:
            return "no samples"
        start = datetime.fromtimestamp(self._start_ns / 1e9, tz=UTC)
        parts = [
            describe_count(self._samples, "sample"),
            describe_count(len(self._cpus), "CPU"),
            f"{(self._end_ns - self._start_ns) / 1e9:.1f} s from {start:%Y-%m-%d %H:%M:%S} UTC",
            *(f"{rate} Hz" for rate in sorted(self._rates)),
            f"{self._lost:,} lost",
        ]
        return " · ".join(parts)


class _Columns:
    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._strings: dict[str, int] = {"": 0}
        self._frames: dict[Entry | str, int] = {}
        self._nodes: dict[tuple[int, int], int] = {}
        self._processes: dict[tuple[str, int | None], int] = {}
        self._threads: dict[tuple[str, int, int], int] = {}
        self._samples: Counter[tuple[int, int, int]] = Counter()
        self._leaves: dict[tuple[str, str, Stack], int] = {}
        self._entries: dict[Stack, tuple[int, ...]] = {}

    def add(self, weighed: Weighed) -> None:
        root, resource, sample, weight = weighed
        name = process_name(resource, sample.thread_name)
        process = _index(self._processes, (name, process_id(resource)))
        thread = _index(self._threads, (sample.thread_name, sample.tid, process))
        key = (self._leaf(root, name, sample.stack), thread, sample.cpu)
        self._samples[key] += weight

    def _leaf(self, root: str, process: str, stack: Stack) -> int:
        leaf = self._leaves.get((root, process, stack))
        if leaf is None:
            frames = self._entries.get(stack)
            if frames is None:
                frames = tuple(_index(self._frames, entry) for entry in stack_entries(stack))
                self._entries[stack] = frames
            leaf = _index(self._nodes, (-1, _index(self._frames, root))) if root else -1
            leaf = _index(self._nodes, (leaf, _index(self._frames, process)))
            for frame in frames:
                leaf = _index(self._nodes, (leaf, frame))
            self._leaves[root, process, stack] = leaf
        return leaf

    def _string(self, text: str) -> int:
        return _index(self._strings, text)

    def as_json(self) -> dict[str, Any]:
        frames = [
            (self._string(frame), 0, 0, _KINDS["process"], 0)
            if isinstance(frame, str)
            else (
                self._string(frame.label), self._string(frame.module), self._string(frame.reason),
                _KINDS[frame.color], int(frame.inlined),
            )
            for frame in self._frames
        ]  # fmt: skip
        processes = [(self._string(name), pid) for name, pid in self._processes]
        threads = [(self._string(name), tid, process) for name, tid, process in self._threads]
        samples = [(*key, count) for key, count in self._samples.items()]
        return {
            "unit": self._unit,
            "strings": [escape_controls(text) for text in self._strings],
            "frames": _columns(frames, "name", "module", "reason", "kind", "inlined"),
            "nodes": _columns(list(self._nodes), "parent", "frame"),
            "processes": _columns(processes, "name", "pid"),
            "threads": _columns(threads, "name", "tid", "process"),
            "samples": _columns(samples, "node", "thread", "cpu", "count"),
        }


def _index(table: dict[Any, int], key: Any) -> int:
    return table.setdefault(key, len(table))


def _columns(rows: list[Any], *names: str) -> dict[str, list[Any]]:
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}
