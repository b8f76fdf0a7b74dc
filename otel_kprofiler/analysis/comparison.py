"""Compares two profiles: which groups grew or shrank, and which changes are significant.

Each profile is divided into intervals of equal length. The variance of a group's fraction across
the intervals of a profile shows how much the fraction may differ between profiles by chance, even
if samples occur in bursts. With few samples, the variance is underestimated, so a change must also
be significant in a test of the sample counts. A profile whose samples all have the same time, such
as a pprof file, cannot be divided, so its samples are assumed to be independent of each other. If
nothing has changed between the profiles, at most 5 in 100 comparisons report any change (Holm, "A
simple sequentially rejective multiple test procedure", 1979).
"""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Final, NamedTuple

from otel_kprofiler.analysis.chance import chance_of_counts, chance_of_means, margin_factor
from otel_kprofiler.analysis.groups import Group
from otel_kprofiler.analysis.occurrences import Key
from otel_kprofiler.analysis.samples import Samples

LEVEL: Final = 0.05
"""Maximum probability that a comparison reports any change although nothing has changed."""
_INTERVALS: Final = 24
_FEWEST_PER_INTERVAL: Final = 10
_FEWEST_SAMPLES: Final = 10
"""Groups with fewer samples, in both profiles combined, are not tested."""

Grouping = Callable[[Samples], list[Group]]


class Part(NamedTuple):
    """One profile in a comparison: samples of one kind and the Unix time range that they cover."""

    samples: Samples
    start_ns: int
    end_ns: int


class Amount(NamedTuple):
    """A group's fraction of the total weight, or its rate, in each of the compared profiles.

    Attributes:
        before: fraction of the total weight, or weight per second, in the first profile.
        after: fraction or rate in the second profile.
        margin: half-width of the 95 % confidence interval for ``change``.
        chance: p-value of the change, for this group alone.
    """

    before: float
    after: float
    margin: float
    chance: float

    @property
    def change(self) -> float:
        """Returns the increase from the first to the second profile; negative for a decrease."""
        return self.after - self.before


class Change(NamedTuple):
    """The self and total weight of a group in the two profiles being compared.

    Attributes:
        own: the group's self weight, as a fraction or a rate.
        total: weight of all samples in which the key occurs, as a fraction or a rate.
        is_changed: whether ``own`` or ``total`` changed significantly, corrected for the number
            of groups tested.
    """

    key: Key
    own: Amount
    total: Amount
    is_changed: bool


def compare(before: Part, after: Part, grouping: Grouping, *, per_second: bool) -> list[Change]:
    """Returns the change in each group, ordered by significance, then by size.

    ``before`` and ``after`` must contain samples of the same kind. ``grouping`` is a function like
    those in ``GROUPINGS``. With ``per_second``, compares weights per second instead of fractions of
    the total weight.
    """
    sides = _Side(before, grouping, per_second), _Side(after, grouping, per_second)
    keys = dict.fromkeys([*sides[0].total, *sides[1].total])
    estimates = [
        (
            key,
            _estimate(sides, [side.own.get(key) for side in sides]),
            _estimate(sides, [side.total.get(key) for side in sides]),
        )
        for key in keys
    ]
    chances = [min(self_amount.chance, total.chance) for _, self_amount, total in estimates]
    changed = _reject(chances)
    changes = [Change(*estimate, is_changed=at in changed) for at, estimate in enumerate(estimates)]
    return sorted(changes, key=_importance)


def _importance(change: Change) -> tuple[bool, float, float, Key]:
    gain, total_gain = change.own.change, change.total.change
    return not change.is_changed, -abs(gain), -abs(total_gain), change.key


class _Side:
    def __init__(self, part: Part, grouping: Grouping, per_second: bool) -> None:
        samples = part.samples
        times = len(set(samples.times))
        most = min(_INTERVALS, samples.count // _FEWEST_PER_INTERVAL, times)
        count = max(2, most) if times > 1 else 1
        self.own: dict[Key, list[int]] = {}
        self.total: dict[Key, list[int]] = {}
        sizes = [0] * count
        for at, piece in enumerate(_split(part, count)):
            for group in grouping(piece):
                for table, weight in ((self.own, group.own), (self.total, group.total)):
                    table.setdefault(group.key, [0] * count)[at] += weight
                sizes[at] += group.own
        self.weight_per_sample = sum(sizes) / max(1, samples.count)
        seconds = (part.end_ns - part.start_ns) / 1e9
        self.sizes = [seconds / count] * count if per_second else [float(size) for size in sizes]
        self.size = sum(self.sizes)
        self.observations = count if count > 1 else max(2, samples.count)
        self._is_rate = per_second

    def ratio(self, weights: Sequence[int]) -> tuple[float, float]:
        """Returns a group's fraction or rate, and its variance.

        The variance is that of independent samples (Poisson for rates, binomial for fractions) if
        the profile is a single interval, and otherwise that between intervals (Cochran 1977,
        section 6.3).
        """
        if not self.size:
            return 0.0, 0.0
        ratio, count = sum(weights) / self.size, len(weights)
        if count == 1:
            rest = 1.0 if self._is_rate else 1 - ratio
            return ratio, ratio * rest * self.weight_per_sample / self.size
        rests = (weight - ratio * size for weight, size in zip(weights, self.sizes, strict=True))
        return ratio, count / (count - 1) * sum(rest * rest for rest in rests) / self.size**2


def _split(part: Part, count: int) -> list[Samples]:
    edges = [part.start_ns + (part.end_ns - part.start_ns) * at // count for at in range(1, count)]
    return part.samples.split(edges)


def _estimate(sides: tuple[_Side, _Side], weights: Sequence[Sequence[int] | None]) -> Amount:
    """Estimates a group's fraction or rate. ``weights`` is None for a profile without the group."""
    rows = [row or [0] * len(side.sizes) for side, row in zip(sides, weights, strict=True)]
    (first_ratio, first), (after, second) = (
        side.ratio(row) for side, row in zip(sides, rows, strict=True)
    )
    weight = max(side.weight_per_sample for side in sides) or 1.0
    per_sample = [side.weight_per_sample or weight for side in sides]  # either profile may be empty
    counts = [round(sum(row) / each) for row, each in zip(rows, per_sample, strict=True)]
    sizes = [side.size / each for side, each in zip(sides, per_sample, strict=True)]
    chance = 1.0
    if sum(counts) >= _FEWEST_SAMPLES:
        chance = max(
            chance_of_counts(counts[0], counts[1], sizes[0] / sum(sizes)),
            chance_of_means(
                after - first_ratio,
                (first, sides[0].observations),
                (second, sides[1].observations),
            ),
        )
    margin = sqrt(first + second) * margin_factor(sum(side.observations for side in sides) - 2)
    return Amount(first_ratio, after, margin, chance)


def _reject(chances: Sequence[float]) -> set[int]:
    """Returns the indices of groups that changed significantly, given their p-values.

    ``chances`` contains a p-value for each group, or 1 if the group has too few samples to be
    tested. The number of tested groups must not depend on the outcome of the tests. ``LEVEL``
    bounds the probability of any false positive.
    """
    tested = sorted((chance, at) for at, chance in enumerate(chances) if chance < 1)
    changed = set()
    for rank, (chance, at) in enumerate(tested):
        if 2 * chance * (len(tested) - rank) > LEVEL:
            break
        changed.add(at)
    return changed
