"""Only the samples that ran in certain modules, or that are not idle waits."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from otel_kprofiler.model import Frame, Profile, ResourceSamples, Stack, Window


def select_modules(windows: Iterable[Window], names: Collection[str]) -> list[Window]:
    """Windows with only those samples that have a frame in one of the modules.

    A module is found whether it is loaded or built into vmlinux; ``-`` and ``_`` are the same
    in its name, as for modprobe. What is left out counts as never taken.
    """
    wanted = {plain_module(name) for name in names}

    @cache
    def matches(stack: Stack) -> bool:
        return any(not wanted.isdisjoint(module_names(frame)) for frame in stack.frames)

    def select(profile: Profile) -> Profile:
        groups = [
            ResourceSamples(group.resource, samples)
            for group in profile.resources
            if (samples := [sample for sample in group.samples if matches(sample.stack)])
        ]
        kept = replace(profile, resources=groups, lost={}, totals=None)
        return replace(kept, taken=kept.sample_count)

    return [replace(window, profiles=list(map(select, window.profiles))) for window in windows]


class LeftOut(NamedTuple):
    """Number and weight of samples that are not shown."""

    samples: int
    weight_ns: int


def leave_out_idle(windows: Iterable[Window]) -> tuple[list[Window], LeftOut]:
    """Windows without waits of threads that have no work, and what those are together.

    The totals of waits stay those of all samples.
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
    """Names of the modules that the code of a frame is of, as :func:`plain_module` has them."""
    names = {plain_module(name) for name in frame.builtin}
    return names | {plain_module(frame.module.name)} if frame.module else names


def plain_module(name: str) -> str:
    """The name of a module with ``-`` as ``_``."""
    return name.replace("-", "_")
