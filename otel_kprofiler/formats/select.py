"""Selects samples by module, and drops idle waits."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from otel_kprofiler.model import Frame, Profile, ResourceSamples, Stack, Window


def select_modules(windows: Iterable[Window], names: Collection[str]) -> list[Window]:
    """Returns windows with only the samples that have a frame in any of the modules.

    Matches loaded and built-in modules. ``-`` and ``_`` are treated as the same character, as by
    modprobe. The counts of the returned windows cover only the selected samples.
    """
    wanted = {plain_module(name) for name in names}

    @cache
    def matches(stack: Stack) -> bool:
        return any(not wanted.isdisjoint(module_names(frame)) for frame in stack.frames)

    def select(profile: Profile) -> Profile:
        return profile.select(
            [
                ResourceSamples(group.resource, samples)
                for group in profile.resources
                if (samples := [sample for sample in group.samples if matches(sample.stack)])
            ]
        )

    return [replace(window, profiles=list(map(select, window.profiles))) for window in windows]


class LeftOut(NamedTuple):
    """The number and weight of omitted samples."""

    samples: int
    weight_ns: int


def leave_out_idle(windows: Iterable[Window]) -> tuple[list[Window], LeftOut]:
    """Returns windows without the waits of idle threads, and a count of the omitted waits.

    The windows' exact wait totals are unchanged.
    """
    samples = weight_ns = 0
    kept = []
    for window in windows:
        profiles = []
        for profile in window.profiles:
            groups = [
                group._replace(samples=[sample for sample in group.samples if not sample.is_idle])
                for group in profile.resources
            ]
            busy = replace(profile, resources=groups)
            samples += profile.sample_count - busy.sample_count
            weight_ns += profile.weight - busy.weight
            profiles.append(busy)
        kept.append(replace(window, profiles=profiles))
    return kept, LeftOut(samples, weight_ns)


def module_names(frame: Frame) -> set[str]:
    """Returns the names of a frame's modules, normalized by :func:`plain_module`."""
    names = {plain_module(name) for name in frame.builtin}
    return names | {plain_module(frame.module.name)} if frame.module else names


def plain_module(name: str) -> str:
    """Normalizes the name of a module: ``-`` becomes ``_``."""
    return name.replace("-", "_")
