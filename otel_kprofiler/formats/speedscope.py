"""Profiles for https://www.speedscope.app, in its documented file format."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import repeat
from typing import Any, Final

from otel_kprofiler.formats.entries import Entry, process_id, process_name, stack_entries
from otel_kprofiler.model import Resource, Stack, Window
from otel_kprofiler.text import escape_surrogates
from otel_kprofiler.version import __version__

SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"


def speedscope(windows: Iterable[Window], *, name: str = "otel-kprofiler") -> str:
    """JSON with one profile of everything, then one per CPU in the order of time.

    In the profile of everything equal stacks are merged and weights are numbers of samples;
    in a CPU's each sample stands for itself and weighs the sampling period in nanoseconds.
    The outermost frame is the process.
    """
    writer = _Writer()
    for window in windows:
        if window.kind.sample_unit == "nanoseconds":
            writer.unit = "nanoseconds"
        for group in window.resources:
            for sample in group.samples:
                stack = writer.stack(sample.stack, group.resource, sample.thread_name)
                times = sample.timestamps_unix_ns
                weights = sample.values or repeat(window.period_ns or 1)
                writer.weights[stack] += sample.weight
                writer.cpus[sample.cpu] += [
                    (time, stack, weight) for time, weight in zip(times, weights, strict=False)
                ]
    return writer.text(name)


class _Writer:
    def __init__(self) -> None:
        self.unit = "none"  # of the weights; "nanoseconds" is the only other one that occurs here
        self.weights: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self.cpus: defaultdict[int, list[tuple[int, tuple[int, ...], int]]] = defaultdict(list)
        self._frames: dict[Entry | str, int] = {}
        self._stacks: dict[Stack, tuple[int, ...]] = {}

    def stack(self, stack: Stack, resource: Resource, thread_name: str) -> tuple[int, ...]:
        """Indices of the frames of a stack, outermost first, below its process."""
        indices = self._stacks.get(stack)
        if indices is None:
            indices = tuple(self._frame(entry) for entry in stack_entries(stack))
            self._stacks[stack] = indices
        process = f"{process_name(resource, thread_name)} ({process_id(resource)})"
        return (self._frame(process), *indices)

    def _frame(self, frame: Entry | str) -> int:
        return self._frames.setdefault(frame, len(self._frames))

    def text(self, name: str) -> str:
        profiles = [_profile("all CPUs", self.unit, list(self.weights.items()))]
        for cpu, samples in sorted(self.cpus.items()):
            ordered = [(stack, period) for _, stack, period in sorted(samples)]
            profiles.append(_profile(f"CPU {cpu}", "nanoseconds", ordered))
        document = {
            "$schema": SCHEMA,
            "exporter": f"otel-kprofiler@{__version__}",
            "name": escape_surrogates(name),
            "activeProfileIndex": 0,
            "shared": {"frames": [_frame_json(frame) for frame in self._frames]},
            "profiles": profiles,
        }
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def _frame_json(frame: Entry | str) -> dict[str, Any]:
    if isinstance(frame, str):
        return {"name": escape_surrogates(frame)}
    found: dict[str, Any] = {"name": escape_surrogates(frame.name)}
    if frame.file or frame.module:
        found["file"] = escape_surrogates(frame.file or frame.module)
    if frame.line:
        found["line"] = frame.line
    return found


def _profile(name: str, unit: str, samples: list[tuple[tuple[int, ...], int]]) -> dict[str, Any]:
    weights = [weight for _, weight in samples]
    return {
        "type": "sampled",
        "name": name,
        "unit": unit,
        "startValue": 0,
        "endValue": sum(weights),
        "samples": [stack for stack, _ in samples],
        "weights": weights,
    }
