"""Kernel lock waits: lock types, lock holders and totals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

LOCK_TYPE: Final = "otel_kprofiler.lock.type"
"""Label on lock wait samples: a value of :data:`LOCK_TYPES`, or :data:`OTHER_LOCK`."""
LOCK_HOLDER_ID: Final = "otel_kprofiler.lock.holder.thread.id"
"""Label on lock wait samples: thread id, in the initial pid namespace, of the lock's holder."""
LOCK_HOLDER_NAME: Final = "otel_kprofiler.lock.holder.thread.name"

_SPIN, _READ, _WRITE, _RT, _PERCPU, _MUTEX = (1 << bit for bit in range(6))

LOCK_TYPES: Final[Mapping[int, str]] = {
    0: "semaphore",
    _SPIN: "spinlock",
    _SPIN | _READ: "rwlock:R",
    _SPIN | _WRITE: "rwlock:W",
    _READ: "rwsem:R",
    _WRITE: "rwsem:W",
    _RT: "rt-mutex",
    _RT | _READ: "rwlock-rt:R",
    _RT | _WRITE: "rwlock-rt:W",
    _PERCPU | _READ: "pcpu-sem:R",
    _PERCPU | _WRITE: "pcpu-sem:W",
    _MUTEX: "mutex",
    _MUTEX | _SPIN: "mutex",
}
"""Lock types by ``contention_begin`` flags (``LCB_F_*``), named as in ``perf lock contention``.
"""
OTHER_LOCK: Final = "other"
UNCOUNTED_LOCK: Final = "uncounted"
"""Lock type for waits whose start or end was not observed, which have a total time of 0."""


def name_lock(flags: int) -> str:
    """Returns the type of a lock, given the flags of a ``contention_begin`` event."""
    return LOCK_TYPES.get(flags, OTHER_LOCK)


class LockHolder(NamedTuple):
    """The thread that held a lock when a wait began; ``tid`` is in the initial pid namespace."""

    tid: int
    comm: bytes


class LockWait(NamedTuple):
    """A wait for a lock, as recorded in a sample; ``holder`` is None if unknown."""

    type: str
    holder: LockHolder | None = None


class LockTotal(NamedTuple):
    """Exact number and total time of completed waits for locks of one type."""

    waits: int
    total_ns: int

    def plus(self, other: LockTotal) -> LockTotal:
        """Returns the sum of two totals."""
        return LockTotal(self.waits + other.waits, self.total_ns + other.total_ns)

    def minus(self, other: LockTotal) -> LockTotal:
        """Returns the difference between two totals."""
        return LockTotal(self.waits - other.waits, self.total_ns - other.total_ns)


LockTotals = Mapping[str, LockTotal]
_NONE: Final = LockTotal(0, 0)


def add_lock_totals(first: LockTotals, second: LockTotals) -> LockTotals:
    """Adds the totals for each lock type."""
    return {
        name: first.get(name, _NONE).plus(second.get(name, _NONE)) for name in {**first, **second}
    }


def subtract_lock_totals(later: LockTotals, earlier: LockTotals) -> LockTotals:
    """Returns how much the totals have grown, by type; omits types that have not grown."""
    growth = {name: total.minus(earlier.get(name, _NONE)) for name, total in later.items()}
    return {name: total for name, total in growth.items() if any(total)}
