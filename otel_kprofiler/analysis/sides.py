"""Only the frames of certain sides of stacks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from otel_kprofiler.analysis.samples import Samples
from otel_kprofiler.model import Stack


def select_sides(samples: Samples, names: Collection[str]) -> Samples:
    """All samples with only those frames that are of these sides, by name or type of frame.

    So a function of Python counts what it calls in other languages and in the kernel as its own.
    """

    def kept(stack: Stack) -> Stack:
        return Stack(
            tuple(
                side
                for side in stack.sides
                if side.kind.name in names or side.kind.frame_type in names
            )
        )

    stacks = [kept(stack) for stack in samples.tables.stacks]
    return replace(samples, tables=samples.tables._replace(stacks=stacks))
