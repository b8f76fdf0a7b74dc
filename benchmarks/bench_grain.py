"""Compares Resource granularities by label sets, bytes and encoding time, with 500 processes."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.bench_otlp import HOST, best_of, mixed_load_window
from benchmarks.rows import Row
from otel_kprofiler.model import (
    Attributes,
    Profile,
    Resource,
    ResourceSamples,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import encode_window
from otel_kprofiler.processes import Grain, merge_resources

PROCESSES: Final = 500
CONTAINERS: Final = 20
SERVICES: Final = 10
EXECUTABLES: Final = 40
REPLACED: Final = 25
"""Number of processes that exit in each window, each replaced by a process with the same
executable."""
CPU_PAIRS: Final = 5
"""Number of copies of the recorded samples, which are from two CPUs."""


def make_process(number: int, incarnation: int = 0) -> Attributes:
    """Returns a process's attributes. One process in ten belongs to no container or service."""
    executable = f"program-{number % EXECUTABLES}"
    attributes = {
        **HOST,
        "process.pid": 1000 + number + PROCESSES * incarnation,
        "process.creation.time": f"2025-06-15T15:{incarnation:02}:{number % 60:02}.123Z",
        "process.executable.name": executable,
        "process.executable.path": f"/usr/bin/{executable}",
    }
    if number % 10 == 0:
        return attributes
    return attributes | {
        "container.id": f"{number % CONTAINERS:064x}",
        "service.name": f"service-{number % SERVICES}",
        "service.instance.id": f"{number:08x}-{incarnation:04x}",
    }


def make_windows(count: int) -> Iterator[Window]:
    """Yields windows with the samples of the mixed load, spread over all processes on a host."""
    recorded = mixed_load_window(user=False)
    taken = [sample for _, sample in recorded.samples] * CPU_PAIRS
    length = recorded.end_unix_ns - recorded.start_unix_ns
    incarnations = [0] * PROCESSES
    for window in range(count):
        groups: list[list[WindowSample]] = [[] for _ in range(PROCESSES)]
        for index, sample in enumerate(taken):
            number = index % PROCESSES
            times = [time + window * length for time in sample.timestamps_unix_ns]
            cpu = sample.cpu + 2 * (index * CPU_PAIRS // len(taken))
            tid = 1000 + number + PROCESSES * incarnations[number]
            groups[number].append(sample._replace(tid=tid, cpu=cpu, timestamps_unix_ns=times))
        resources = [
            ResourceSamples(Resource(make_process(number, incarnations[number])), samples)
            for number, samples in enumerate(groups)
        ]
        start = recorded.start_unix_ns + window * length
        old = recorded.profiles[0]
        yield Window(start, start + length, [Profile(old.kind, old.period_ns, resources)])
        for index in range(REPLACED):
            incarnations[(window * REPLACED + index) % PROCESSES] += 1


def count_series(windows: Sequence[Window]) -> int:
    """Returns the number of distinct combinations of profile kind and Resource attributes."""
    return len({
        (profile.kind.name, frozenset(group.resource.attributes.items()))
        for window in windows
        for profile in window.profiles
        for group in profile.resources
    })  # fmt: skip


def rows(quick: bool) -> Iterator[Row]:
    """Yields measurements for each granularity, over a minute in which processes start and exit."""
    windows = list(make_windows(3 if quick else 12))
    finest: dict[str, float] = {}
    for grain in Grain:
        merged = [merge_resources(window, grain, HOST.keys()) for window in windows]
        payloads = [batch.payload for window in merged for batch in encode_window(window).batches]
        raw = sum(map(len, payloads)) / len(windows)
        packed = sum(len(gzip.compress(payload, 6)) for payload in payloads) / len(windows)
        spent = best_of(
            3 if quick else 10,
            lambda grain=grain: encode_window(merge_resources(windows[0], grain, HOST.keys())),
        )
        of_all, of_one = count_series(merged), count_series(merged[:1])
        figures = {
            f"series of {len(windows)} windows": (of_all, f"{of_all} ({of_one} in each)"),
            "bytes per window, gzip": (packed, f"{packed:,.0f} B ({raw:,.0f} raw)"),
            "merge and encode": (spent, f"{spent / windows[0].sample_count * 1e6:.2f} µs/sample"),
        }
        for what, (figure, text) in figures.items():
            beside = "" if grain is Grain.PROCESS else "grain process"
            ratio = figure / finest[what] if what in finest else None
            finest.setdefault(what, figure)
            yield Row(f"resources: {grain.value}, {what}", text, beside, ratio)
