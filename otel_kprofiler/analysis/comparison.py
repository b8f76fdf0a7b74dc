"""Compares two profiles: what gained, what lost, and what of it is more than chance.

Each side is cut into intervals of equal length. How much a share varies between the intervals of a
side shows how much it may differ between the sides without a cause, also where samples come in
bursts. For few samples that shows too little, so a test of the two counts must agree. In
comparisons of equal profiles, at most five of a hundred call any group changed (Holm, "A simple
sequentially rejective multiple test procedure", 1979).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Final, NamedTuple

from otel_kprofiler.analysis.chance import chance_of_counts, chance_of_means, margin_factor
from otel_kprofiler.analysis.groups import Group
from otel_kprofiler.analysis.occurrences import Key
from otel_kprofiler.analysis.samples import Samples

LEVEL: Final = 0.05
"""Chance that any group of two equal profiles is called changed."""
_INTERVALS: Final = 24
_FEWEST_PER_INTERVAL: Final = 10
_FEWEST_SAMPLES: Final = 10
"""Samples of both sides together that a group needs to be compared."""

Grouping = Callable[[Samples], list[Group]]


class Part(NamedTuple):
    """One side of a comparison: samples of one kind, and the Unix time that they cover."""

    samples: Samples
    start_ns: int
    end_ns: int


class Amount(NamedTuple):
    """How much of a profile a group is, on both sides.

    Attributes:
        before: share of the weight of all samples, or weight per second.
        after: the same for the other side.
        margin: the change lies within so much of ``change``, in 95 of 100 comparisons.
        chance: of a change at least that large if there is no cause, for this group alone.
    """

    before: float
    after: float
    margin: float
    chance: float

    @property
    def change(self) -> float:
        """The increase; negative for a decrease."""
        return self.after - self.before


class Change(NamedTuple):
    """A group on both sides.

    Attributes:
        key: what the group is called.
        own: of the samples that belong to this group and no other.
        total: of all samples that the key occurs in.
        is_changed: whether one of the two differs by more than chance, seen with all other groups.
    """

    key: Key
    own: Amount
    total: Amount
    is_changed: bool


def compare(before: Part, after: Part, grouping: Grouping, *, per_second: bool) -> list[Change]:
    """The groups of either side: those that changed first, then by the size of the change.

    Args:
        before: the first side.
        after: the second; of the same kind.
        grouping: such as those of ``GROUPINGS``.
        per_second: compare weights per second; otherwise shares of all samples.
    """
    sides = _Side(before, grouping, per_second), _Side(after, grouping, per_second)
    keys = dict.fromkeys([*sides[0].total, *sides[1].total])
    found = [
        (
            key,
            _estimate(sides, [side.own.get(key) for side in sides]),
            _estimate(sides, [side.total.get(key) for side in sides]),
        )
        for key in keys
    ]
    chances = [min(own.chance, total.chance) for _, own, total in found]
    changed = _reject(chances)
    changes = [Change(*one, is_changed=at in changed) for at, one in enumerate(found)]
    return sorted(changes, key=_importance)


def _importance(change: Change) -> tuple[bool, float, float, Key]:
    gain, total_gain = change.own.change, change.total.change
    return not change.is_changed, -abs(gain), -abs(total_gain), change.key


class _Side:
    """The weights of all groups of a side in each interval."""

    def __init__(self, part: Part, grouping: Grouping, per_second: bool) -> None:
        samples = part.samples
        count = max(2, min(_INTERVALS, samples.count // _FEWEST_PER_INTERVAL))
        self.own: dict[Key, list[int]] = {}
        self.total: dict[Key, list[int]] = {}
        sizes = [0] * count
        for at, piece in enumerate(_split(part, count)):
            for group in grouping(piece):
                for table, weight in ((self.own, group.own), (self.total, group.total)):
                    table.setdefault(group.key, [0] * count)[at] += weight
                sizes[at] += group.own
        self.weight_per_sample = sum(sizes) / max(1, samples.count) or 1.0
        seconds = (part.end_ns - part.start_ns) / 1e9
        self.sizes = [seconds / count] * count if per_second else [float(size) for size in sizes]
        self.size = sum(self.sizes)

    def ratio(self, weights: Sequence[int]) -> tuple[float, float]:
        """A ratio of sums over the intervals, and its variance (Cochran, Sampling Techniques, 6.3).

        It comes from the deviations of whole intervals, so samples may come in bursts.
        """
        if not self.size:
            return 0.0, 0.0
        ratio, count = sum(weights) / self.size, len(weights)
        rests = (weight - ratio * size for weight, size in zip(weights, self.sizes, strict=True))
        return ratio, count / (count - 1) * sum(rest * rest for rest in rests) / self.size**2


def _split(part: Part, count: int) -> list[Samples]:
    edges = [part.start_ns + (part.end_ns - part.start_ns) * at // count for at in range(1, count)]
    return part.samples.split(edges)


def _estimate(sides: tuple[_Side, _Side], weights: Sequence[Sequence[int] | None]) -> Amount:
    """Estimates the amount of a group; None: it does not occur on that side."""
    rows = [found or [0] * len(side.sizes) for side, found in zip(sides, weights, strict=True)]
    (before, first), (after, second) = (
        side.ratio(row) for side, row in zip(sides, rows, strict=True)
    )
    counts = [
        round(sum(row) / side.weight_per_sample) for side, row in zip(sides, rows, strict=True)
    ]
    sizes = [side.size / side.weight_per_sample for side in sides]
    chance = 1.0
    if sum(counts) >= _FEWEST_SAMPLES:
        chance = max(
            chance_of_counts(counts[0], counts[1], sizes[0] / sum(sizes)),
            chance_of_means(after - before, (first, len(rows[0])), (second, len(rows[1]))),
        )
    margin = sqrt(first + second) * margin_factor(sum(map(len, rows)) - 2)
    return Amount(before, after, margin, chance)


def _reject(chances: Sequence[float]) -> set[int]:
    """Selects the changed groups, so that the chance of any mistake is at most ``LEVEL``.

    Args:
        chances: the smaller one of self and total, 1 where there are too few samples: the number of
            tests must not depend on how they end.
    """
    tested = sorted((chance, at) for at, chance in enumerate(chances) if chance < 1)
    changed = set()
    for rank, (chance, at) in enumerate(tested):
        if 2 * chance * (len(tested) - rank) > LEVEL:
            break
        changed.add(at)
    return changed
