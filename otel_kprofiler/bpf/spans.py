"""Registers the slots in which threads publish their active span.

A slot refers to two interpreter objects, which the sampler follows at the interrupt, so a change of
span costs no system call and no conversion.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from otel_kprofiler.bpf.map_calls import delete_from_map, update_map
from otel_kprofiler.forks import LockedForForks, ProcessLock

_SLOT: Final = struct.Struct("=2Q")  # struct span_slot
SLOT_BYTES: Final = _SLOT.size


class SpanLayout(NamedTuple):
    """Memory layout of span contexts in this interpreter (``struct span_layout``).

    Types are identified by address; objects of other types are not followed. Offsets are in bytes
    from the start of an object, which has its reference count and then its type. An integer has a
    word with the number of digits, followed by digits of 30 bits.

    Attributes:
        span_context_type: type of span contexts, tuples that begin with trace id, span id,
            whether the span is remote, and flags, whose lowest bit means sampled.
        token_type: ``contextvars.Token``.
        int_type: type of the ids.
        flags_type: type of the flags, with the layout of ``int``.
        false_at: address of ``False``.
        items_at: offset of the first item of a span context.
        token_context_at: offset of the context in a token.
        variables_at: offset of the mapping of variables in a context.
        size_shift: number of bits below the number of digits.
        negative_bit: the bit among these that marks negative integers; 0 if a negative size does.
        unsampled: 1 to include spans that are not sampled.
    """

    span_context_type: int
    token_type: int
    int_type: int
    flags_type: int
    false_at: int
    items_at: int
    token_context_at: int
    variables_at: int
    size_shift: int
    negative_bit: int
    unsampled: int


class SpanSlots(LockedForForks):
    """The map of slots by thread. Thread-safe.

    Args:
        slots_fd: descriptor of the map.
        slots: maximum number of entries.
    """

    def __init__(self, slots_fd: int, slots: int) -> None:
        self._slots_fd = slots_fd
        self._slots = slots
        self._used: set[int] = set()
        self._lock = ProcessLock()

    def register(self, tid: int, owner_at: int, context_at: int) -> bool:
        """Register the slot of a thread; False if no entry is free.

        Args:
            tid: thread id in this process's pid namespace (``threading.get_native_id()``).
            owner_at: address of three pointers (``struct said``): to the context in which the span
                is active, or a token created in it; to the span context, or any other object
                without a span and while the other pointers change; and to the mapping of
                variables that the context had then.
            context_at: address of the pointer to the thread's current context.

        Raises:
            OSError: the kernel refused.
        """
        with self._lock:
            if tid not in self._used and len(self._used) == self._slots:
                return False
            value = _SLOT.pack(owner_at, context_at)
            update_map(self._slots_fd, tid.to_bytes(4, "little"), value)
            self._used.add(tid)
            return True

    def release(self, tid: int) -> bool:
        """Remove a thread's slot; call before the thread's memory is reused.

        Returns:
            Whether the thread had a slot; always False after :meth:`close`.
        """
        with self._lock:
            if tid not in self._used:
                return False
            self._used.remove(tid)
            delete_from_map(self._slots_fd, tid.to_bytes(4, "little"))
            return True

    def close(self) -> None:
        """Forget all threads and reject new ones; the owner of the map closes it."""
        with self._lock:
            self._slots = 0
            self._used.clear()
