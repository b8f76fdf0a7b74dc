"""Checks whether this host supports reading thread contexts, and opens their BPF maps."""

from collections.abc import Callable

from otel_kprofiler.bpf import (
    MAX_CONTEXT_PROCESSES,
    SLOT_WORDS,
    KernelTypes,
    LoadedObject,
    ThreadContexts,
    find_thread_pointer,
)
from otel_kprofiler.sampling.loading import find_offsets


def plan_contexts(read_types: Callable[[], KernelTypes]) -> int:
    """Returns the thread pointer's offset in ``task_struct``; 0 if contexts cannot be read."""
    return find_offsets(find_thread_pointer, read_types) or 0


def context_map_entries(thread_pointer: int) -> dict[str, int]:
    """Returns the number of entries in each thread context map, by map name."""
    processes = MAX_CONTEXT_PROCESSES if thread_pointer else 1
    return {"thread_contexts": processes, "context_slots": SLOT_WORDS}


def open_contexts(thread_pointer: int, program: LoadedObject) -> ThreadContexts:
    """Open the maps for thread contexts.

    If ``thread_pointer`` is 0, no process can be registered.
    """
    if not thread_pointer:
        return ThreadContexts(None)
    return ThreadContexts(program.map_fd("thread_contexts"), program.map_fd("context_slots"))
