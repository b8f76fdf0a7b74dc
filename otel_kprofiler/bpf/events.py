"""Finds the kernel struct offsets for reading a perf event's attributes (``events.bpf.h``)."""

import struct
from typing import Final, NamedTuple

from otel_kprofiler.bpf.btf import KernelTypes

EVENT_LAYOUT: Final = ".rodata.events"
"""Section that contains the ``event_layout`` constant."""
_LAYOUT: Final = struct.Struct("=4Q")


class EventOffsets(NamedTuple):
    """Mirrors ``struct event_layout``, whose comments describe the fields."""

    in_context: int
    attributes: int

    def pack(self, cpus: int, *, may_nest: bool = False) -> bytes:
        """Packs the struct. Each event has counters for ``cpus`` CPUs."""
        return _LAYOUT.pack(*self, cpus, may_nest)


def find_event_offsets(types: KernelTypes) -> EventOffsets | None:
    """Returns a kernel's struct offsets; None if its structs have an unexpected layout."""
    event = types.offset("bpf_perf_event_data_kern", "event")
    attributes = types.offset("perf_event", "attr")
    if not event or attributes is None:
        return None
    return EventOffsets(event, attributes)
