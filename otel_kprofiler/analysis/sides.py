"""Selects stack frames by type, such as kernel or user."""

from collections.abc import Collection
from dataclasses import replace

from otel_kprofiler.analysis.groups import in_kernel
from otel_kprofiler.analysis.samples import Samples
from otel_kprofiler.model import Stack


def select_sides(samples: Samples, names: Collection[str]) -> Samples:
    """Keeps only frames whose type, or whose side (such as ``kernel``), is in ``names``.

    Time spent in an omitted frame is attributed to the nearest remaining caller. Groups of the
    returned samples still state how much of their weight was in the kernel.
    """

    def kept(stack: Stack) -> Stack:
        return Stack(
            tuple(
                side
                for side in stack.sides
                if side.kind.name in names or side.kind.frame_type in names
            )
        )

    tables = samples.tables
    stacks = [kept(stack) for stack in tables.stacks]
    return replace(samples, tables=tables._replace(stacks=stacks, in_kernel=in_kernel(tables)))
