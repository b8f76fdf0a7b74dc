"""Computes sample weights, for reports with one number per stack."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from otel_kprofiler.model import Profile, ProfileKind, Resource, Window, WindowSample


def unit_of(kind: ProfileKind) -> str:
    """Returns the unit of a kind's values. Counts have the unit ``samples`` or ``events``."""
    if kind.sample_unit != "count":
        return kind.sample_unit
    return "samples" if kind.counts_samples else "events"


def mixed_kinds(profiles: Iterable[Profile]) -> set[ProfileKind]:
    """Returns the kinds whose profiles have different periods.

    The values of such a kind can be added up only in the unit of the kind's ``measure``.
    """
    periods: dict[ProfileKind, int] = {}
    return {
        profile.kind
        for profile in profiles
        if periods.setdefault(profile.kind, profile.period_ns) != profile.period_ns
    }


class Weighed(NamedTuple):
    """A sample and its weight.

    ``root`` is the kind's name; empty if all samples are of one kind.
    """

    root: str
    resource: Resource
    sample: WindowSample
    weight: int


def weigh(windows: Iterable[Window]) -> Iterator[Weighed]:
    """Yields the samples in windows, with their weights.

    With a single kind of sample and a single period, the weights are the samples' values.
    Otherwise, each sample's weight is in the unit of its kind's ``measure``. With several kinds,
    ``root`` names the kind.
    """
    profiles = [profile for window in windows for profile in window.profiles]
    is_single = len({profile.kind for profile in profiles}) <= 1
    is_measured = not is_single or bool(mixed_kinds(profiles))
    for profile in profiles:
        kind = profile.kind
        root = "" if is_single else f"{kind.name} ({kind.unit})"
        for resource, sample in profile.samples:
            weight = profile.measure(sample.weight) if is_measured else sample.weight
            yield Weighed(root, resource, sample, weight)
