"""Waits: periods in which a thread is off the CPU."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class WaitState(enum.IntEnum):
    """State of a thread that is off the CPU; the names are those on the wire and in reports.

    States of the task (``include/linux/sched.h``), except for :attr:`RUNNABLE`: the thread waits
    for a CPU, after a preemption or between wake-up and run (``run_delay`` of
    ``/proc/PID/schedstat``).
    """

    RUNNABLE = 0
    INTERRUPTIBLE = 1
    UNINTERRUPTIBLE = 2
    STOPPED = 3
    """Stopped by a signal or traced."""
    IDLE = 4
    """A kernel thread that waits for work without counting as load (``TASK_IDLE``)."""

    @property
    def label(self) -> str:
        """Returns the name, in lower case."""
        return self.name.lower()


class Waker(NamedTuple):
    """The thread that ended a wait, as ``sched_waking`` saw it.

    Attributes:
        tgid: its process id in the initial pid namespace; 0 if an interrupt woke the thread on an
            idle CPU.
        tid: its thread id.
        comm: its name, at most 15 bytes.
        stack: its kernel stack, runtime addresses as native-endian 64-bit words, leaf first; empty
            if not collected.
    """

    tgid: int
    tid: int
    comm: bytes
    stack: bytes = b""


class Wait(NamedTuple):
    """The wait of a sample.

    A thread that is woken and then waits for a CPU yields two samples with the same stack: one in
    the state of its sleep, one runnable.

    Attributes:
        state: state of the thread.
        start_ns: ``CLOCK_BOOTTIME`` at which it left the CPU.
        duration_ns: time off the CPU in this state, without suspends of the host. The sample's
            value is this time divided by the probability of sampling the wait.
        is_ended: False if the wait continues; later samples report the rest.
        in_iowait: the task's flag of waits for block I/O.
        is_throttled: whether the thread's cgroup had used up its CPU quota.
        waker: thread that ended it; None if unknown.
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
        by_state: nanoseconds by state, including the elapsed part of unfinished waits.
        switches: number of ended waits.
        below_ns: share of the time in waits too short to be sampled.
        has_ended: whether all threads that waited have exited; not kept in profiles.
    """

    by_state: tuple[int, ...]
    switches: int
    below_ns: int = 0
    has_ended: bool = False

    @property
    def total_ns(self) -> int:
        """Returns nanoseconds in all states."""
        return sum(self.by_state)

    def plus(self, other: WaitTotals) -> WaitTotals:
        """Returns the sums of both."""
        states = zip(self.by_state, other.by_state, strict=True)
        return WaitTotals(
            tuple([a + b for a, b in states]),
            self.switches + other.switches,
            self.below_ns + other.below_ns,
        )


NO_WAITS: Final = WaitTotals((0,) * len(WaitState), 0)
