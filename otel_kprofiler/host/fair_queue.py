"""Gives work that processes cause a turn each, within a long-term share of one CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, NamedTuple, TypeVar

from otel_kprofiler.host.cpu_share import CpuShare

TURN_NS: Final = 100_000
"""Cost of a turn beside its CPU time, so that turns that cost none rotate, too."""
RECENT_NS: Final = 60_000_000_000
"""How long an owner may not use the reserve after its turn."""
RESERVE: Final = 0.2
"""Part of the share that is the reserve."""
MAX_OWNERS: Final = 1024
"""Owners whose cost is remembered; others start anew."""

T = TypeVar("T")


class Turn(NamedTuple, Generic[T]):
    """Work that was taken.

    Attributes:
        owner: who caused it.
        item: the work.
        share: CPU time that it is paid from.
    """

    owner: Hashable
    item: T
    share: CpuShare


class FairQueue(Generic[T]):
    """Work by owner: the owner that has cost the least has the next turn. Not thread-safe.

    This is start-time fair queueing: an owner with new work starts at the cost of the last turn's
    owner, so that idle time earns no credit. Of owners that have cost the same, the one that has
    waited longest is next.

    All owners together have a share of one CPU. A fifth of it is a reserve for owners that had no
    turn in the last minute: they do not wait until the expensive work of another is paid for.

    Args:
        share: CPU seconds earned per second.
        now_ns: any steady clock, in nanoseconds.
    """

    def __init__(self, share: float, now_ns: Callable[[], int]) -> None:
        self._share = CpuShare(share * (1 - RESERVE))
        self._reserve = CpuShare(share * RESERVE)
        self._now_ns = now_ns
        self._waiting: dict[Hashable, deque[T]] = {}  # without empty ones; longest waiting first
        self._costs: dict[Hashable, int] = {}
        self._last_ns: dict[Hashable, int] = {}  # time of the last turn, the oldest first
        self._level = 0  # cost of the last turn's owner before it
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def put(self, owner: Hashable, item: T) -> None:
        """Add work behind that of the same owner."""
        if owner not in self._waiting:
            self._waiting[owner] = deque()
            self._costs[owner] = max(self._costs.get(owner, 0), self._level)
        self._waiting[owner].append(item)
        self._length += 1

    def wait_ns(self) -> int | None:
        """Time until there is CPU time for a turn; 0 if there is now, None without work."""
        return self._choose()[0] if self._waiting else None

    def take(self) -> Turn[T] | None:
        """Take the next work; None if there is none, or no CPU time for it."""
        if not self._waiting:
            return None
        wait_ns, owner, share = self._choose()
        if wait_ns:
            return None
        queue = self._waiting.pop(owner)
        item = queue.popleft()
        if queue:
            self._waiting[owner] = queue
        self._length -= 1
        self._level = self._costs[owner]
        self._costs[owner] += TURN_NS
        self._last_ns.pop(owner, None)
        self._last_ns[owner] = self._now_ns()
        self._forget()
        return Turn(owner, item, share)

    def done(self, turn: Turn[T], cpu_ns: int) -> None:
        """Account for the CPU time of a turn."""
        turn.share.spend(cpu_ns)
        if turn.owner in self._costs:
            self._costs[turn.owner] += cpu_ns

    def drop_last(self) -> T | None:
        """Remove the newest work of the owner with most of it; None if there is none.

        Of owners with equally much, that which has waited for the shortest time loses it.
        """
        if not self._waiting:
            return None
        owner = max(reversed(self._waiting), key=lambda one: len(self._waiting[one]))
        queue = self._waiting[owner]
        item = queue.pop()
        if not queue:
            del self._waiting[owner]
            if owner not in self._last_ns:
                del self._costs[owner]
        self._length -= 1
        return item

    def clear(self) -> list[T]:
        """Remove and return all work."""
        items = [item for queue in self._waiting.values() for item in queue]
        self._waiting.clear()
        self._length = 0
        return items

    def lift_limit(self) -> None:
        """Let work take all CPU time from now on."""
        self._share = CpuShare(1.0)

    def _choose(self) -> tuple[int, Hashable, CpuShare]:
        """How long the next owner must wait, who that is, and what its turn is paid from."""
        now_ns = self._now_ns()
        wait_ns = self._share.wait_ns(now_ns)
        owner = min(self._waiting, key=self._costs.__getitem__)
        if not wait_ns:
            return 0, owner, self._share
        before_ns = now_ns - RECENT_NS
        new = [one for one in self._waiting if self._last_ns.get(one, before_ns) <= before_ns]
        if new:
            reserve_ns = self._reserve.wait_ns(now_ns)
            if reserve_ns < wait_ns:
                return reserve_ns, min(new, key=self._costs.__getitem__), self._reserve
        return wait_ns, owner, self._share

    def _forget(self) -> None:
        """Forget the owner without work whose last turn is the longest ago."""
        if len(self._last_ns) > MAX_OWNERS:
            oldest = next(iter(self._last_ns))
            del self._last_ns[oldest]
            if oldest not in self._waiting:
                self._costs.pop(oldest, None)
