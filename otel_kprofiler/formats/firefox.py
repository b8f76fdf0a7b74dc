"""Writes profiles for https://profiler.firefox.com, in its processed format.

The format is described by ``src/types/profile.ts`` and ``docs-developer/CHANGELOG-formats.md`` in
github.com/firefox-devtools/profiler. Later profiler versions upgrade profiles in this format.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby, repeat
from typing import Any, Final, NamedTuple

from otel_kprofiler.formats.entries import process_id, process_name
from otel_kprofiler.formats.firefox_tables import SharedTables, columns
from otel_kprofiler.formats.weights import unit_of
from otel_kprofiler.model import (
    ON_CPU,
    Profile,
    ProfileKind,
    Resource,
    SpanLink,
    WaitState,
    Window,
    WindowSample,
)
from otel_kprofiler.text import escape_surrogates
from otel_kprofiler.version import __version__

PROCESSED_VERSION: Final = 70
"""Version of the processed format (``PROCESSED_PROFILE_VERSION``)."""
_GECKO_VERSION: Final = 36
"""Version of Firefox's internal (Gecko) format, which the processed format must also contain."""
_MS: Final = 1_000_000
_INSTANT, _INTERVAL = 0, 1  # MarkerPhase
_WEIGHT_TYPES: Final = {"bytes": "bytes", "nanoseconds": "tracing-ms"}
"""Weight types, by the unit of the sample kind. For other units, the type is ``samples``."""
_WAIT, _SPAN = "wait", "span"
_SCHEMA: Final = [
    {
        "name": _WAIT,
        "display": ["marker-chart", "marker-table", "timeline-overview"],
        "chartLabel": "{marker.data.reason}",
        "tableLabel": "{marker.data.reason}",
        "tooltipLabel": "wait: {marker.data.reason}",
        "description": "The thread was off the CPU. A short wait has no duration here: it was "
        "sampled at random, and represents other short waits, too.",
        "fields": [
            {"key": "reason", "label": "Waited for", "format": "string"},
            {"key": "state", "label": "State", "format": "string"},
            {"key": "weight", "label": "Stands for", "format": "duration"},
            {"key": "waker", "label": "Woken by", "format": "string"},
            {"key": "ended", "label": "Ended", "format": "string"},
        ],
    },
    {
        "name": _SPAN,
        "display": ["marker-chart", "marker-table", "timeline-overview"],
        "chartLabel": "{marker.data.endpoint}",
        "tableLabel": "{marker.data.endpoint} {marker.data.span}",
        "tooltipLabel": "span: {marker.data.endpoint}",
        "description": "From the first to the last sample in a span; the span may be longer.",
        "fields": [
            {"key": "endpoint", "label": "Endpoint", "format": "string"},
            {"key": "trace", "label": "Trace", "format": "string"},
            {"key": "span", "label": "Span", "format": "string"},
        ],
    },
]


class _Point(NamedTuple):
    """One occurrence of a sample. Points are ordered by time."""

    time_ns: int
    measure: int
    """The sample's value, in the unit of its kind's measure."""
    threshold_ns: int
    sample: WindowSample


class _Marker(NamedTuple):
    start_ns: int
    end_ns: int
    """Equal to ``start_ns`` if the marker has no duration."""
    name: str
    data: dict[str, Any]


class _Process(NamedTuple):
    name: str
    pid: int | None


def firefox(windows: Iterable[Window]) -> str:
    """Returns JSON with a track for each thread and sample kind. Samples are in time order.

    The weight of an on-CPU sample is one sampling period. Waits and other events have separate
    tracks, named after their kind. Waits and spans are also shown as markers on the thread's first
    track. Lost samples, and reasons for frames without names, are listed under "Profile Info" in
    Firefox Profiler.
    """
    return json.dumps(_Writer(list(windows)).document(), separators=(",", ":"), ensure_ascii=False)


class _Writer:
    def __init__(self, windows: list[Window]) -> None:
        self._windows = windows
        self._start_ns = min((window.start_unix_ns for window in windows), default=0)
        self._tables = SharedTables()
        self._pids: Counter[int | None] = Counter()
        self._processes: dict[_Process, str] = {}
        self._tracks: dict[tuple[str, int], dict[ProfileKind, list[_Point]]]
        self._tracks = defaultdict(dict)
        self._periods: set[int] = set()
        self._reasons: Counter[str] = Counter()
        self._waits_ns: Counter[tuple[str, int, int]] = Counter()
        """Total duration of the parts of each wait, keyed by process, thread and time."""
        self._estimates: set[int] = set()
        """Durations that recur, and therefore are estimates for randomly sampled waits."""

    def document(self) -> dict[str, Any]:
        for window in self._windows:
            for profile in window.profiles:
                self._periods |= {profile.period_ns} - {0}
                for resource, sample in profile.samples:
                    self._add(profile, resource, sample)
        recurring = Counter(self._waits_ns.values())
        self._estimates = {value for value, count in recurring.items() if count > 1}
        names = {text: process.name for process, text in self._processes.items()}
        threads = [
            thread
            for (pid, tid), kinds in sorted(self._tracks.items(), key=lambda item: item[0])
            for thread in self._threads(names[pid], pid, tid, kinds)
        ]
        shared = self._tables.as_json()
        return {
            "meta": self._meta(),
            "libs": self._tables.libs(),
            "shared": shared,
            "threads": threads,
        }

    def _add(self, profile: Profile, resource: Resource, sample: WindowSample) -> None:
        process = _Process(process_name(resource, sample.thread_name), process_id(resource))
        pid = self._processes.get(process)
        if pid is None:
            pid = self._processes[process] = self._new_pid(process)
        points = self._tracks[pid, sample.tid].setdefault(profile.kind, [])
        for reason in self._tables.reasons(sample.stack):
            self._reasons[reason] += len(sample.timestamps_unix_ns)
        values = sample.values or repeat(1)
        for time, value in zip(sample.timestamps_unix_ns, values, strict=False):
            points.append(_Point(time, profile.measure(value), profile.threshold_ns, sample))
            if sample.wait is not None:
                self._waits_ns[pid, sample.tid, time] += value

    def _new_pid(self, process: _Process) -> str:
        """Returns a unique id: the pid, followed by a number if several programs had this pid."""
        earlier = self._pids[process.pid]
        self._pids[process.pid] += 1
        text = "unknown" if process.pid is None else str(process.pid)
        return f"{text}.{earlier}" if earlier else text

    def _threads(
        self, process: str, pid: str, tid: int, kinds: dict[ProfileKind, list[_Point]]
    ) -> Iterator[dict[str, Any]]:
        for points in kinds.values():
            points.sort(key=lambda point: point.time_ns)
        markers = self._markers(kinds.values())
        is_first = True
        for kind in sorted(kinds, key=lambda kind: kind != ON_CPU):
            samples = self._samples(kind, kinds[kind])
            starts = [*samples["time"][:1], *[self._ms(row.start_ns) for row in markers[:1]]]
            name = kinds[kind][-1].sample.thread_name
            yield {
                "processType": "default",
                "processStartupTime": 0,
                "processShutdownTime": None,
                "registerTime": min(starts),
                "unregisterTime": None,
                "pausedRanges": [],
                "showMarkersInTimeline": bool(markers),
                "name": escape_surrogates(name if kind == ON_CPU else f"{name} {kind.name}"),
                "isMainThread": is_first and pid.partition(".")[0] == str(tid),
                "processName": escape_surrogates(process),
                "pid": pid,
                "tid": tid if is_first else f"{tid} {kind.name}",
                "samples": samples,
                "markers": self._marker_table(markers),
            }
            is_first, markers = False, []

    def _samples(self, kind: ProfileKind, points: list[_Point]) -> dict[str, Any]:
        """Returns the table of samples, in which samples without a stack represent gaps.

        A sample represents time spent before its timestamp, but Firefox Profiler draws the sample
        over the whole interval since the preceding sample.
        """
        rows: list[tuple[int | None, float, float, int]] = []
        last_ns = 0
        for point in points:
            stack, weight = self._tables.stack(point.sample.stack), point.measure
            if kind.is_time:
                begin_ns = max(point.time_ns - weight, self._start_ns)
                if begin_ns - last_ns > weight // 2:
                    rows.append((None, self._ms(begin_ns), 0, 0))
            shown = weight / _MS if kind.is_time else weight
            rows.append((stack, self._ms(point.time_ns), shown, weight))
            last_ns = point.time_ns
        table = columns(rows, "stack", "time", "weight", "threadCPUDelta")
        if kind != ON_CPU:
            del table["threadCPUDelta"]
        return table | {"weightType": _WEIGHT_TYPES.get(kind.measure[1], "samples")}

    def _markers(self, tracks: Iterable[list[_Point]]) -> list[_Marker]:
        points = sorted(
            (point for track in tracks for point in track), key=lambda point: point.time_ns
        )
        markers = list(_spans(points))
        waits = [point for point in points if point.sample.wait is not None]
        for _, together in groupby(waits, lambda point: point.time_ns):
            markers += self._waits(list(together))
        return sorted(markers, key=lambda marker: (marker.start_ns, -marker.end_ns))

    def _waits(self, parts: list[_Point]) -> Iterator[_Marker]:
        """Yields markers for the parts of a wait, in order: asleep, then runnable."""
        end_ns = parts[0].time_ns
        value = sum(part.measure for part in parts)
        is_exact = value > parts[0].threshold_ns and value not in self._estimates
        for part in sorted(parts, key=_is_sleep):
            start_ns = end_ns - part.measure if is_exact else end_ns
            data = _wait_data(part)
            data["cause"] = {
                "time": self._ms(start_ns),
                "stack": self._tables.stack(part.sample.stack),
            }
            yield _Marker(start_ns, end_ns, f"wait: {data['reason']}", data)
            end_ns = start_ns

    def _marker_table(self, markers: list[_Marker]) -> dict[str, Any]:
        rows = [
            (
                marker.data,
                self._tables.string(marker.name),
                self._ms(marker.start_ns),
                self._ms(marker.end_ns) if marker.end_ns > marker.start_ns else None,
                _INTERVAL if marker.end_ns > marker.start_ns else _INSTANT,
                0,
            )
            for marker in markers
        ]
        return columns(rows, "data", "name", "startTime", "endTime", "phase", "category")

    def _meta(self) -> dict[str, Any]:
        end_ns = max((window.end_unix_ns for window in self._windows), default=0)
        return {
            "interval": min(self._periods, default=_MS) / _MS,
            "startTime": self._start_ns / _MS,
            "profilingStartTime": 0,
            "profilingEndTime": self._ms(end_ns),
            "processType": 0,
            "product": "otel-kprofiler",
            "importedFrom": f"otel-kprofiler {__version__}",
            "stackwalk": 1,
            "version": _GECKO_VERSION,
            "preprocessedProfileVersion": PROCESSED_VERSION,
            "symbolicated": True,
            "usesOnlyOneStackType": True,
            "sourceCodeIsNotOnSearchfox": True,
            "platform": "X11",
            "oscpu": "Linux",
            "categories": self._tables.categories(),
            "markerSchema": _SCHEMA,
            "sampleUnits": {"time": "ms", "eventDelay": "ms", "threadCPUDelta": "ns"},
            "extra": [
                {"label": label, "entries": entries}
                for label, entries in self._remarks().items()
                if entries
            ],
        }

    def _remarks(self) -> dict[str, list[dict[str, Any]]]:
        counts, lost = Counter[str](), Counter[str]()
        for window in self._windows:
            for profile in window.profiles:
                counts[f"{profile.kind.name} ({unit_of(profile.kind)})"] += profile.weight
                for cause, count in profile.lost.items():
                    lost[f"{profile.kind.name}: {cause.value}"] += count
        lost = lost or Counter({"any kind": 0})
        return {
            "Samples": _entries(counts),
            "Lost samples": _entries(lost),
            "Samples with missing or unnamed frames": _entries(self._reasons),
        }

    def _ms(self, time_ns: int) -> float:
        return (time_ns - self._start_ns) / _MS


def _spans(points: list[_Point]) -> Iterator[_Marker]:
    for link, run in groupby(points, lambda point: point.sample.link):
        if link is None:
            continue
        times = [point.time_ns for point in run]
        yield _Marker(times[0], times[-1], "span", _span_data(link))


def _span_data(link: SpanLink) -> dict[str, Any]:
    return {
        "type": _SPAN,
        "endpoint": escape_surrogates(link.local_root),
        "trace": link.trace_id.hex(),
        "span": link.span_id.hex(),
    }


def _wait_data(point: _Point) -> dict[str, Any]:
    wait = point.sample.wait
    assert wait is not None  # noqa: S101 - callers select waits
    data = {
        "type": _WAIT,
        "reason": wait.cause.label if wait.cause else wait.state.label,
        "state": wait.state.label,
        "weight": point.measure / _MS,
    }
    if wait.waker:
        data["waker"] = f"{escape_surrogates(wait.waker.name)} ({wait.waker.tid})"
    if not wait.is_ended:
        data["ended"] = "no: it continued"
    return data


def _is_sleep(point: _Point) -> bool:
    wait = point.sample.wait
    return wait is not None and wait.state is not WaitState.RUNNABLE


def _entries(counts: Counter[str]) -> list[dict[str, Any]]:
    return [
        {"label": escape_surrogates(label), "format": "integer", "value": count}
        for label, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
