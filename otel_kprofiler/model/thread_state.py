"""Threads at one moment: state, wait and stack."""

from __future__ import annotations

from typing import NamedTuple

from otel_kprofiler.model.sample import LabelSet, SpanLink
from otel_kprofiler.model.stack import Stack
from otel_kprofiler.model.wait import WaitState
from otel_kprofiler.model.wait_cause import WaitCause


class ThreadState(NamedTuple):
    """A thread at one moment.

    Attributes:
        tgid: process id, in the pid namespace of the reader.
        tid: thread id, in the pid namespace of the reader.
        name: the thread's name.
        state: why the thread is off the CPU; None while it runs.
        waited_ns: time since the thread left the CPU, excluding host suspends; None while it runs,
            or if unknown.
        cause: the cause of its wait; None while it runs.
        stack: its stack; without sides if it ran while it was read.
        switches: number of its context switches so far.
        link: its current span, if known.
        labels: attributes of its thread context that are not part of ``link``.
        has_moved: whether it ran, or its stack changed, since the first of two dumps; None if there
            was only one, or if the thread is new.
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
    """The threads of a process at one moment.

    Attributes:
        tgid: process id.
        name: the process's ``comm``.
        threads: its threads, by id.
        ended: number of threads that have exited but are not reaped yet.
        time_ns: ``CLOCK_BOOTTIME`` at that moment.
    """

    tgid: int
    name: str
    threads: tuple[ThreadState, ...]
    ended: int
    time_ns: int
