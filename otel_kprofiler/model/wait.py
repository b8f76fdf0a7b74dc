"""Waits: times in which a thread is off the CPU."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class WaitState(enum.IntEnum):
    """State of a thread that is off the CPU; the names are those on the wire and in reports.

    States of the task (``include/linux/sched.h``), except for :attr:`RUNNABLE`: that is the time in
    which it wants a CPU, after a preemption and between wake-up and run (the ``run_delay`` of
    ``/proc/PID/schedstat``).
    """

    RUNNABLE = 0
    INTERRUPTIBLE = 1
    UNINTERRUPTIBLE = 2
    STOPPED = 3
    """Stopped by a signal or traced."""
    IDLE = 4
    """Kernel threads that wait for work, and do not count as load (``TASK_IDLE``)."""

    @property
    def label(self) -> str:
        """The name, in lower case."""
        return self.name.lower()


class Waker(NamedTuple):
    """The thread that ended a wait, as ``sched_waking`` saw it.

    Attributes:
        tgid: its process id in the initial pid namespace; 0: an interrupt woke the thread while
            the CPU was idle.
        tid: its thread id.
        comm: its name, at most 15 bytes.
        stack: its kernel stack, runtime addresses as native-endian 64-bit words, leaf first;
            empty if it was not collected.
    """

    tgid: int
    tid: int
    comm: bytes
    stack: bytes = b""


class Wait(NamedTuple):
    """The wait that a sample stands for.

    A wait whose thread is woken and then waits for a CPU gives two samples: one with the state in
    which it slept, one that is runnable, with the same stack.

    Attributes:
        state: in which the thread was.
        start_ns: ``CLOCK_BOOTTIME`` at which it left the CPU.
        duration_ns: time off the CPU in this state that the sample covers; suspends of the host
            do not count. A sample's value is this, divided by the chance with which the wait was
            sampled.
        is_ended: False if it goes on; later samples report the rest.
        in_iowait: the task's flag of waits for block I/O.
        is_throttled: the thread's cgroup had used up its quota of CPU time.
        waker: who ended it; None if that is not known.
    """

    state: WaitState
    start_ns: int
    duration_ns: int
    is_ended: bool = True
    in_iowait: bool = False
    is_throttled: bool = False
    waker: Waker | None = None


class WaitTotals(NamedTuple):
    """Time that threads of a process were off the CPU, without sampling error.

    Attributes:
        by_state: nanoseconds by state; waits that go on count with what has passed.
        switches: number of waits that have ended.
        below_ns: how much of the time was in waits that are too short to be sampled.
        has_ended: whether no thread of the process lives that has waited; not kept in profiles.
    """

    by_state: tuple[int, ...]
    switches: int
    below_ns: int = 0
    has_ended: bool = False

    @property
    def total_ns(self) -> int:
        """Nanoseconds in all states."""
        return sum(self.by_state)

    def plus(self, other: WaitTotals) -> WaitTotals:
        """The sums of both."""
        states = zip(self.by_state, other.by_state, strict=True)
        return WaitTotals(
            tuple([own + more for own, more in states]),
            self.switches + other.switches,
            self.below_ns + other.below_ns,
        )


NO_WAITS: Final = WaitTotals((0,) * len(WaitState), 0)
