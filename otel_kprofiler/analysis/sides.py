"""Selects frames by side of the stack."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from otel_kprofiler.analysis.samples import Samples
from otel_kprofiler.model import Stack


def select_sides(samples: Samples, names: Collection[str]) -> Samples:
    """Returns all samples with only the frames of the given sides, named by side or frame type.

    Time in other languages and in the kernel is then attributed to the calling function.
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
