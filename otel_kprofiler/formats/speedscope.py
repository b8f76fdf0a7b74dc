"""Writes profiles for https://www.speedscope.app, in its documented file format."""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from itertools import repeat
from typing import Any, Final

from otel_kprofiler.formats.entries import Entry, process_id, process_name, stack_entries
from otel_kprofiler.formats.weights import mixed_kinds
from otel_kprofiler.model import ON_CPU, ProfileKind, Resource, Stack, Window
from otel_kprofiler.text import escape_surrogates
from otel_kprofiler.version import __version__

_UNITS: Final = {"bytes", "microseconds", "milliseconds", "nanoseconds", "seconds"}
"""Units that the format supports, besides ``none``."""
SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"


def speedscope(windows: Iterable[Window], *, name: str = "otel-kprofiler") -> str:
    """Returns JSON with a profile for each kind, then a time-ordered profile for each CPU.

    A kind's profile merges identical stacks, weighted in the kind's unit, or by time if the kind
    has different periods. A CPU's profile has all its samples, weighted by time for kinds with a
    period. The outermost frame is the process.
    """
    windows = list(windows)
    writer = _Writer(mixed_kinds(profile for window in windows for profile in window.profiles))
    for window in windows:
        for profile in window.profiles:
            everything = writer.everything[profile.kind]
            for resource, sample in profile.samples:
                stack = writer.stack(sample.stack, resource, sample.thread_name)
                times = sample.timestamps_unix_ns
                weight = sample.weight
                everything[stack] += (
                    profile.measure(weight) if profile.kind in writer.mixed else weight
                )
                weights = map(profile.measure, sample.values or repeat(1))
                writer.cpus[profile.kind, sample.cpu] += [
                    (time, stack, weight) for time, weight in zip(times, weights, strict=False)
                ]
    return writer.text(name)


class _Writer:
    def __init__(self, mixed: Collection[ProfileKind]) -> None:
        self.mixed = mixed
        """Kinds with different periods, whose merged stacks are weighted by time."""
        self.everything: defaultdict[ProfileKind, Counter[tuple[int, ...]]] = defaultdict(Counter)
        self.cpus: defaultdict[tuple[ProfileKind, int], list[tuple[int, tuple[int, ...], int]]]
        self.cpus = defaultdict(list)
        self._frames: dict[Entry | str, int] = {}
        self._stacks: dict[Stack, tuple[int, ...]] = {}

    def stack(self, stack: Stack, resource: Resource, thread_name: str) -> tuple[int, ...]:
        indices = self._stacks.get(stack)
        if indices is None:
            indices = tuple(self._frame(entry) for entry in stack_entries(stack))
            self._stacks[stack] = indices
        process, pid = process_name(resource, thread_name), process_id(resource)
        process = process if pid is None else f"{process} ({pid})"
        return (self._frame(process), *indices)

    def _frame(self, frame: Entry | str) -> int:
        return self._frames.setdefault(frame, len(self._frames))

    def text(self, name: str) -> str:
        kinds = list(self.everything) or [ON_CPU]
        named = {kind: f", {kind.name}" if len(kinds) > 1 else "" for kind in kinds}
        profiles = [
            _profile(
                f"all CPUs{named[kind]}",
                kind.measure[1] if kind in self.mixed else kind.sample_unit,
                self.everything[kind].items(),
            )
            for kind in kinds
        ]
        for (kind, cpu), samples in sorted(self.cpus.items()):
            ordered = [(stack, weight) for _, stack, weight in sorted(samples)]
            profiles.append(_profile(f"CPU {cpu}{named[kind]}", kind.measure[1], ordered))
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
    fields: dict[str, Any] = {"name": escape_surrogates(frame.label)}
    if frame.file or frame.module:
        fields["file"] = escape_surrogates(frame.file or frame.module)
    if frame.line:
        fields["line"] = frame.line
    return fields


def _profile(
    name: str, unit: str, samples: Collection[tuple[tuple[int, ...], int]]
) -> dict[str, Any]:
    weights = [weight for _, weight in samples]
    return {
        "type": "sampled",
        "name": name,
        "unit": unit if unit in _UNITS else "none",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": [stack for stack, _ in samples],
        "weights": weights,
    }
