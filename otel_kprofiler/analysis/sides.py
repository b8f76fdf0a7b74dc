"""Selects stack frames by type, such as kernel or user."""

from collections.abc import Collection
from dataclasses import replace

from otel_kprofiler.analysis.samples import Samples
from otel_kprofiler.model import Stack


def select_sides(samples: Samples, names: Collection[str]) -> Samples:
    """Keeps only frames whose type, or whose side (such as ``kernel``), is in ``names``.

    Time spent in an omitted frame is attributed to the nearest remaining caller.
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
