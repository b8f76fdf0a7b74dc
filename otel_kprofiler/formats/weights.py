"""Computes weights of samples, for reports with one number per stack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from otel_kprofiler.model import Profile, ProfileKind, Resource, Window, WindowSample


def unit_of(kind: ProfileKind) -> str:
    """Returns the unit of a kind's values. Counts have the unit ``samples`` or ``events``."""
    if kind.sample_unit != "count":
        return kind.sample_unit
    return "samples" if kind.counts_samples else "events"


class Weighed(NamedTuple):
    """A sample and its weight. ``root`` names the kind; empty if all samples are of one kind."""

    root: str
    resource: Resource
    sample: WindowSample
    weight: int


class Weights:
    """The weights of the samples in some windows.

    If there is a single kind of sample, the weights are the samples' values. If there are several
    kinds, the weights are measures such as time, and ``root`` names the kind. ``unit`` is empty if
    the weights have different units.
    """

    def __init__(self, windows: Iterable[Window]) -> None:
        self._windows = tuple(windows)
        kinds = dict.fromkeys(
            profile.kind for window in self._windows for profile in window.profiles
        )
        self.kinds: tuple[ProfileKind, ...] = tuple(kinds)
        units = {self._unit(kind) for kind in self.kinds} or {"samples"}
        self.unit = units.pop() if len(units) == 1 else ""

    def samples(self) -> Iterator[Weighed]:
        """Yields all samples with their weights."""
        for window in self._windows:
            for profile in window.profiles:
                root = self._root(profile.kind)
                for resource, sample in profile.samples:
                    yield Weighed(root, resource, sample, self._weigh(profile, sample))

    def _weigh(self, profile: Profile, sample: WindowSample) -> int:
        return sample.weight if len(self.kinds) == 1 else profile.measure(sample.weight)

    def _unit(self, kind: ProfileKind) -> str:
        if len(self.kinds) > 1:
            return kind.unit
        return unit_of(kind)

    def _root(self, kind: ProfileKind) -> str:
        return f"{kind.name} ({self._unit(kind)})" if len(self.kinds) > 1 else ""
