"""Removes the scheduler's functions, in which all threads wait, from wait stacks."""

import errno
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from otel_kprofiler.model.stack import (
    KERNEL_SIDE,
    STACK_OK,
    USER_SIDE,
    Frame,
    ModuleKind,
    Side,
    Stack,
    StackStatus,
)

STACK_NOT_CAPTURED: Final = StackStatus(-errno.ESRCH)
"""The stack was collected neither at the start of the wait nor during the wait."""

_SCHEDULER: Final = frozenset({"__schedule", "schedule"})
_KERNEL_THREAD: Final = "kthread"


class WaitStacks:
    """Removes the scheduler's functions from the leaf end of stacks. Not thread-safe.

    The stack of a thread leaving its CPU starts with tracers (the sampler's and other programs at
    ``sched_switch``), ``__schedule`` and other functions in the scheduler's text. For a thread that
    is already off-CPU, ``stack_trace_save_tsk()`` (kernel/stacktrace.c) omits the tracers and the
    scheduler. After these functions are removed, both stacks of a wait are the same object.

    ``scheduler_rvas`` are the RVAs of the scheduler's text in vmlinux. Without ``scheduler_rvas``,
    only ``__schedule`` and ``schedule`` are recognized, by name.
    """

    def __init__(self, scheduler_rvas: range = range(0)) -> None:
        self._rvas = scheduler_rvas
        self._cut: dict[Stack, Stack] = {}
        self._equal: dict[tuple[object, ...], Stack] = {}

    def cut(self, stack: Stack) -> Stack:
        """Returns the stack without the scheduler's functions; idempotent."""
        cut = self._cut.get(stack)
        if cut is None:
            sides = tuple(map(self._cut_side, stack.sides))
            kernel: Sequence[Frame] = [frame for frame in stack.frames if frame.side is KERNEL_SIDE]
            if any(_name(frame) == _KERNEL_THREAD for frame in kernel[-3:]):
                sides = tuple(map(_without_status, sides))
            # Frames are hashed by identity, but tuples of their fields by value.
            key = tuple((side.kind, tuple(map(tuple, side.frames)), side.status) for side in sides)
            cut = self._cut[stack] = self._equal.setdefault(
                key, stack if sides == stack.sides else Stack(sides)
            )
        return cut

    def _cut_side(self, side: Side) -> Side:
        if side.kind is not KERNEL_SIDE:
            return side
        frames = tuple(side.frames)
        above = len(list(takewhile(lambda frame: not self._is_scheduler(frame), frames)))
        if above == len(frames):
            return side
        cut = above + len(list(takewhile(self._is_scheduler, frames[above:])))
        return side._replace(frames=frames[cut:] or frames[-1:])

    def _is_scheduler(self, frame: Frame) -> bool:
        is_vmlinux = frame.module is not None and frame.module.kind is ModuleKind.VMLINUX
        return (is_vmlinux and frame.address in self._rvas) or _name(frame) in _SCHEDULER


def _without_status(side: Side) -> Side:
    if side.kind is USER_SIDE and side.status == STACK_NOT_CAPTURED:
        return side._replace(status=STACK_OK)
    return side


def _name(frame: Frame) -> str:
    return frame.function.partition(".")[0]
