"""Thread states at a single point in time, with waits and stacks."""

from __future__ import annotations

from typing import NamedTuple

from otel_kprofiler.model.sample import LabelSet, SpanLink
from otel_kprofiler.model.stack import Stack
from otel_kprofiler.model.wait import WaitState
from otel_kprofiler.model.wait_cause import WaitCause


class ThreadState(NamedTuple):
    """The state of a thread at a point in time.

    Attributes:
        tgid, tid: process id and thread id, in the pid namespace of the reading process.
        state: why the thread is off the CPU; None if the thread is running.
        waited_ns: time since the thread left the CPU, excluding time when the host was suspended;
            None if the thread is running, or if unknown.
        cause: the cause of the thread's wait; None while the thread runs.
        stack: the thread's stack; empty if the thread ran while the stack was read.
        switches: number of the thread's context switches so far.
        labels: attributes in the thread's context that are not part of ``link``.
        has_moved: whether the thread ran, or its stack changed, since the first of two dumps; None
            if there was only one dump, or if the thread is new.
    """

    tgid: int
    tid: int
    name: str
    state: WaitState | None
    waited_ns: int | None
    cause: WaitCause | None
    stack: Stack
    switches: int
    link: SpanLink | None = None
    labels: LabelSet = ()
    has_moved: bool | None = None

    @property
    def state_label(self) -> str:
        """Returns the name of the state; ``running`` if the thread is on a CPU."""
        return "running" if self.state is None else self.state.label


class ProcessState(NamedTuple):
    """The threads of a process at ``time_ns`` (``CLOCK_BOOTTIME``).

    ``ended`` counts threads that have exited but have not been reaped.
    """

    tgid: int
    name: str
    threads: tuple[ThreadState, ...]
    ended: int
    time_ns: int
