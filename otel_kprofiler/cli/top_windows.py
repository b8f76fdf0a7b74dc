"""Keeps a sliding window of samples for ``top``, and groups each second's samples only once."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from otel_kprofiler.analysis import (
    Group,
    Key,
    Samples,
    callees,
    callers,
    group_samples,
    load_samples,
    merge_groups,
    select_group,
)
from otel_kprofiler.model import ON_CPU, Losses, ProfileKind, Window, sum_losses

CALLERS: Final = "callers"
CALLEES: Final = "callees"
_KEPT_VIEWS: Final = 4


class View(NamedTuple):
    """A grouping, and the selection of the samples to group.

    Attributes:
        by: a name in ``GROUPINGS``, or ``CALLERS`` or ``CALLEES``.
        scope: groups that restrict the selection, as (grouping, key) pairs. A sample is selected
            only if it is in all groups.
        function: function whose callers or callees are shown; None for other groupings.
    """

    by: str
    scope: tuple[tuple[str, Key], ...] = ()
    function: Key | None = None


@dataclass(slots=True)
class Part:
    """The samples of a short interval, grouped for the views on the screen.

    Attributes:
        samples: samples taken in the interval, excluding idle waits if they are hidden.
        weight: total weight of the samples, in nanoseconds of CPU or wait time, or in events.
    """

    start_unix_ns: int
    end_unix_ns: int
    samples: Samples
    lost: Losses
    weight: int = field(init=False)
    _groups: dict[View, list[Group]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weight = sum(self.samples.weights())

    def groups(self, view: View) -> list[Group]:
        """Returns the groups that a view shows; caches the groups for recent views."""
        groups = self._groups.get(view)
        if groups is None:
            while len(self._groups) >= _KEPT_VIEWS:
                del self._groups[next(iter(self._groups))]
            groups = self._groups[view] = _group(self.samples, view)
        return groups


class Shown:
    """The samples that a screen shows; immutable.

    If ``is_time`` is true, weights are in nanoseconds.
    """

    def __init__(self, parts: Sequence[Part], *, is_time: bool = True) -> None:
        self._parts = tuple(parts)
        self.is_time = is_time
        self.seconds = sum(part.end_unix_ns - part.start_unix_ns for part in parts) / 1e9
        self.samples = sum(part.samples.count for part in parts)
        self.weight = sum(part.weight for part in parts)
        self.lost = sum_losses(part.lost for part in parts)

    def groups(self, view: View) -> list[Group]:
        """Returns the groups shown by a view, merged over all intervals."""
        return merge_groups(part.groups(view) for part in self._parts)

    def scope_weight(self, view: View) -> int:
        """Returns the total weight of the samples that a view selects."""
        if view.scope or view.function:
            return sum(group.own for part in self._parts for group in part.groups(view))
        return self.weight


class SlidingWindow:
    """Keeps the last few seconds of samples of one kind, including idle waits if ``idle``."""

    def __init__(self, seconds: float, kind: ProfileKind = ON_CPU, *, idle: bool = True) -> None:
        self._length_ns = round(seconds * 1e9)
        self._kind, self._idle = kind, idle
        self._parts: deque[Part] = deque()

    def add(self, window: Window) -> None:
        """Add the next window of samples, and drop samples that are too old."""
        profiles = [profile for profile in window.profiles if profile.kind == self._kind]
        samples = load_samples([replace(window, profiles=profiles)])
        samples = samples if self._idle else samples.without_idle()
        lost = sum_losses(profile.lost for profile in profiles)
        self._parts.append(Part(window.start_unix_ns, window.end_unix_ns, samples, lost))
        # Keep a part until its midpoint is older than the limit, because windows close slightly
        # later than planned.
        limit_ns = window.end_unix_ns - self._length_ns
        while (self._parts[0].start_unix_ns + self._parts[0].end_unix_ns) // 2 < limit_ns:
            self._parts.popleft()

    def shown(self) -> Shown:
        """Returns the samples currently in the window."""
        return Shown(self._parts, is_time=self._kind.is_time)


def _group(samples: Samples, view: View) -> list[Group]:
    for by, key in view.scope:
        samples = select_group(samples, by, key)
    if view.function is None:
        return group_samples(samples, view.by)
    find = callers if view.by == CALLERS else callees
    return find(samples, view.function)
