"""Threads' off-CPU waits."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class WaitState(enum.IntEnum):
    """State of an off-CPU thread. The names appear on the wire and in reports.

    Task states (``include/linux/sched.h``), plus :attr:`RUNNABLE`: the thread is waiting for a CPU,
    after a preemption or a wakeup (``run_delay`` in ``/proc/PID/schedstat``).
    """

    RUNNABLE = 0
    INTERRUPTIBLE = 1
    UNINTERRUPTIBLE = 2
    STOPPED = 3
    """Stopped by a signal or a tracer."""
    IDLE = 4
    """A kernel thread waiting for work, not counted in the load average (``TASK_IDLE``)."""

    @property
    def label(self) -> str:
        """Returns the name in lower case."""
        return self.name.lower()


class Waker(NamedTuple):
    """The thread that woke a waiting thread, as reported by ``sched_waking``.

    Attributes:
        tgid: process id in the initial pid namespace; 0 if an interrupt on an idle CPU woke the
            thread.
        comm: thread name, at most 15 bytes.
        stack: kernel stack as native-endian 64-bit runtime addresses, leaf first; empty if omitted.
    """

    tgid: int
    tid: int
    comm: bytes
    stack: bytes = b""


class Wait(NamedTuple):
    """The wait that a sample represents.

    A thread that is woken and then waits for a CPU yields two samples with the same stack: first in
    its sleep state, then runnable.

    Attributes:
        state: why the thread is off the CPU.
        start_ns: boottime at which the thread left the CPU.
        duration_ns: off-CPU time in this state, excluding time while the host was suspended. The
            sample's value is ``duration_ns`` divided by the wait's sampling probability.
        is_ended: False if the wait is ongoing; later samples report the remaining time.
        in_iowait: whether the kernel marked the thread as waiting for block I/O.
        is_throttled: whether the CPU quota of the thread's cgroup was used up.
        waker: thread that woke the waiting thread; None if unknown.
    """

    state: WaitState
    start_ns: int
    duration_ns: int
    is_ended: bool = True
    in_iowait: bool = False
    is_throttled: bool = False
    waker: Waker | None = None


class WaitTotals(NamedTuple):
    """Exact off-CPU time of a process's threads.

    Attributes:
        by_state: nanoseconds by state, including the elapsed part of ongoing waits.
        switches: number of completed waits.
        below_ns: the off-CPU time, in nanoseconds, spent in waits too short to be sampled.
        has_ended: whether all threads that waited have exited; not stored in profiles.
    """

    by_state: tuple[int, ...]
    switches: int
    below_ns: int = 0
    has_ended: bool = False

    @property
    def total_ns(self) -> int:
        """Returns the off-CPU time summed over all states, in nanoseconds."""
        return sum(self.by_state)

    def plus(self, other: WaitTotals) -> WaitTotals:
        """Returns the sum of two totals."""
        states = zip(self.by_state, other.by_state, strict=True)
        return WaitTotals(
            tuple([a + b for a, b in states]),
            self.switches + other.switches,
            self.below_ns + other.below_ns,
        )


NO_WAITS: Final = WaitTotals((0,) * len(WaitState), 0)
