"""Computes sample weights, for reports with one number per stack."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from otel_kprofiler.model import ProfileKind, Resource, Window, WindowSample


def unit_of(kind: ProfileKind) -> str:
    """Returns the unit of a kind's values. Counts have the unit ``samples`` or ``events``."""
    if kind.sample_unit != "count":
        return kind.sample_unit
    return "samples" if kind.counts_samples else "events"


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

    With a single kind of sample, the weights are the samples' values. With several kinds, each
    sample's weight is in the unit of its kind's ``measure``, and ``root`` names the kind.
    """
    profiles = [profile for window in windows for profile in window.profiles]
    is_single = len({profile.kind for profile in profiles}) <= 1
    for profile in profiles:
        kind = profile.kind
        root = "" if is_single else f"{kind.name} ({kind.unit})"
        for resource, sample in profile.samples:
            weight = sample.weight if is_single else profile.measure(sample.weight)
            yield Weighed(root, resource, sample, weight)
