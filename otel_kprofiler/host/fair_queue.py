"""Schedules the agent's work fairly among processes, within a long-term CPU budget."""

from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, NamedTuple, TypeVar

from otel_kprofiler.host.access import Access
from otel_kprofiler.host.cpu_share import CpuShare
from otel_kprofiler.host.process_stat import read_owner

TURN_NS: Final = 100_000
"""Fixed cost of a turn, in nanoseconds, so that owners alternate even if turns take no CPU time."""
RECENT_NS: Final = 60_000_000_000
"""Time after a turn, in nanoseconds, during which the turn's owner cannot use the reserve."""
RESERVE: Final = 0.2
"""Fraction of the CPU budget that is set aside as the reserve."""
MAX_OWNERS: Final = 1024
"""Maximum number of owners, and of groups, with a recorded cost. Excess idle owners are dropped."""

_FILES: Final = Access()

T = TypeVar("T")


class Turn(NamedTuple, Generic[T]):
    """A work item, its owner (a process), and the CPU budget to charge."""

    owner: Hashable
    item: T
    share: CpuShare


def find_user(owner: Hashable) -> Hashable:
    """Returns the effective user id of the process if ``owner`` is a pid; otherwise ``owner``."""
    return read_owner(_FILES, owner) if isinstance(owner, int) else owner


class FairQueue(Generic[T]):
    """A work queue in which the owner with the lowest cost is next; not thread-safe.

    The group with the lowest cost is scheduled first, so that a group with many owners does not
    deprive other groups of their turns.

    This is start-time fair queueing. An owner with new work starts with the cost of the last owner
    served in the same group, so that idle time earns no credit. Among owners with equal costs, the
    owner that has waited longest is next.

    All owners combined may use ``share`` seconds of CPU time per second on average. A fifth of this
    time is reserved for owners that have not had a turn in the last minute, so that another owner's
    expensive work does not delay them.
    """

    def __init__(
        self,
        share: float,
        now_ns: Callable[[], int],
        find_group: Callable[[Hashable], Hashable] = lambda _: None,
    ) -> None:
        self._share = CpuShare(share * (1 - RESERVE))
        self._reserve = CpuShare(share * RESERVE)
        self._now_ns, self._find_group = now_ns, find_group
        self._waiting: dict[Hashable, deque[T]] = {}  # by owner; longest waiting first
        self._groups: dict[Hashable, Hashable] = {}  # group of each owner with a recorded cost
        self._costs: dict[Hashable, _Costs] = {}  # costs per owner, by group
        self._group_costs = _Costs()
        self._last_ns: dict[Hashable, int] = {}  # time of each owner's last turn, oldest first
        self._sizes: Counter[Hashable] = Counter()  # amount of pending work, by group

    def __len__(self) -> int:
        return self._sizes.total()

    def put(self, owner: Hashable, item: T) -> None:
        """Append work to its owner's queue."""
        if owner not in self._waiting:
            self._waiting[owner] = deque()
            group = self._find_group(owner)
            if self._groups.get(owner, group) != group:
                self._remove(owner)
            self._groups[owner] = group
            self._costs.setdefault(group, _Costs()).begin(owner)
            if not self._sizes[group]:
                self._group_costs.begin(group)
        self._waiting[owner].append(item)
        self._sizes[self._groups[owner]] += 1

    def wait_ns(self) -> int | None:
        """Returns the nanoseconds until the next turn may start; None if the queue is empty."""
        return self._choose()[0] if self._waiting else None

    def take(self) -> Turn[T] | None:
        """Take the next work item; None if there is no work, or no CPU time left for it."""
        if not self._waiting:
            return None
        wait_ns, owner, share = self._choose()
        if wait_ns:
            return None
        queue = self._waiting.pop(owner)
        item = queue.popleft()
        if queue:
            self._waiting[owner] = queue
        self._shrink(owner)
        group = self._groups[owner]
        self._costs[group].take(owner)
        self._group_costs.take(group)
        self._last_ns.pop(owner, None)
        self._last_ns[owner] = self._now_ns()
        self._forget()
        return Turn(owner, item, share)

    def done(self, turn: Turn[T], cpu_ns: int, children_ns: int = 0) -> None:
        """Account for the CPU time used in a turn.

        The CPU time of child processes, ``children_ns``, is charged to the owner's later turns, but
        not to the CPU budget common to all owners.
        """
        turn.share.spend(cpu_ns)
        if turn.owner in self._groups:
            group = self._groups[turn.owner]
            self._costs[group][turn.owner] += cpu_ns + children_ns
            if group in self._group_costs:
                self._group_costs[group] += cpu_ns + children_ns

    def drop_last(self) -> T | None:
        """Remove and return the newest item from the owner with the most items; None if empty.

        Considers only owners in the group with the most items. Among owners with the same number of
        items, chooses the owner that has waited for the shortest time.
        """
        if not self._waiting:
            return None
        sizes, groups = self._sizes, self._groups
        owner = max(
            reversed(self._waiting), key=lambda key: (sizes[groups[key]], len(self._waiting[key]))
        )
        queue = self._waiting[owner]
        item = queue.pop()
        self._shrink(owner)
        if not queue:
            del self._waiting[owner]
            if owner not in self._last_ns:
                self._remove(owner)
        return item

    def _remove(self, owner: Hashable) -> None:
        group = self._groups.pop(owner)
        del self._costs[group][owner]
        if not self._costs[group]:
            del self._costs[group]

    def _shrink(self, owner: Hashable) -> None:
        group = self._groups[owner]
        self._sizes[group] -= 1
        if not self._sizes[group]:
            del self._sizes[group]

    def clear(self) -> list[T]:
        """Remove and return all waiting work."""
        items = [item for queue in self._waiting.values() for item in queue]
        self._waiting.clear()
        self._sizes.clear()
        return items

    def lift_limit(self) -> None:
        """Stop limiting CPU time."""
        self._share = CpuShare(1.0)

    def _choose(self) -> tuple[int, Hashable, CpuShare]:
        """Returns the time until the next turn, the turn's owner, and the CPU budget to charge."""
        now_ns = self._now_ns()
        wait_ns = self._share.wait_ns(now_ns)
        owner = min(self._waiting, key=self._rank)
        if not wait_ns:
            return 0, owner, self._share
        before_ns = now_ns - RECENT_NS
        new = [key for key in self._waiting if self._last_ns.get(key, before_ns) <= before_ns]
        if new:
            reserve_ns = self._reserve.wait_ns(now_ns)
            if reserve_ns < wait_ns:
                return reserve_ns, min(new, key=self._rank), self._reserve
        return wait_ns, owner, self._share

    def _rank(self, owner: Hashable) -> tuple[int, int]:
        group = self._groups[owner]
        return self._group_costs[group], self._costs[group][owner]

    def _forget(self) -> None:
        """Drop the idle owner that was served least recently."""
        if len(self._last_ns) > MAX_OWNERS:
            oldest = next(iter(self._last_ns))
            del self._last_ns[oldest]
            if oldest not in self._waiting and oldest in self._groups:
                self._remove(oldest)
        if len(self._group_costs) > MAX_OWNERS:
            idle = (group for group in self._group_costs if group not in self._sizes)
            if (group := next(idle, None)) is not None:
                del self._group_costs[group]


class _Costs(dict[Hashable, int]):
    """Maps each key to its cost. A key with new work starts at the last taken key's cost."""

    def __init__(self) -> None:
        super().__init__()
        self._level = 0  # cost of the most recently taken key, before its turn was added

    def begin(self, key: Hashable) -> None:
        self[key] = max(self.get(key, 0), self._level)

    def take(self, key: Hashable) -> None:
        self._level = self[key]
        self[key] += TURN_NS
