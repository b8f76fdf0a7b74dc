"""Removes frames of the sampler's BPF program and of its kernel callers from tracepoint stacks."""

import re
from itertools import takewhile
from typing import Final

from otel_kprofiler.model.stack import KERNEL_SIDE, Frame, Side, Stack

_PROGRAMS: Final = re.compile("_kprofiler_(trace|lock)")
"""Matches the sampler's program names, even if the kernel truncated them to 15 characters."""
_CALLERS: Final = re.compile(r"bpf_trace_run\d+|__bpf_trace_\w+|__traceiter_\w+")


class TracepointStacks:
    """Trims stacks so that the leaf is the function containing the tracepoint. Not thread-safe."""

    def __init__(self) -> None:
        self._cut: dict[Stack, Stack] = {}

    def cut(self, stack: Stack) -> Stack:
        """Returns ``stack`` without the sampler's frames; ``stack`` itself if nothing changes."""
        cut = self._cut.get(stack)
        if cut is None:
            sides = tuple(map(_cut_side, stack.sides))
            cut = self._cut[stack] = stack if sides == stack.sides else Stack(sides)
        return cut


def _cut_side(side: Side) -> Side:
    if (
        side.kind is not KERNEL_SIDE
        or not side.frames
        or not _PROGRAMS.search(side.frames[0].function)
    ):
        return side
    frames = tuple(side.frames)
    above = 1 + len(list(takewhile(_is_caller, frames[1:])))
    return side._replace(frames=frames[above:] or frames[-1:])


def _is_caller(frame: Frame) -> bool:
    return _CALLERS.fullmatch(frame.function.partition(".")[0]) is not None
