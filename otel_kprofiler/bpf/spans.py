"""Where threads say which span is current in them, for the sampler to read.

A thread keeps two of the interpreter's objects in a place that the sampler knows, and the sampler
follows them at the interrupt: a change of span costs no system call and no conversion.
"""

from __future__ import annotations

import struct
import threading
from typing import Final, NamedTuple

from otel_kprofiler.bpf.loader import delete_from_map, update_map

_SLOT: Final = struct.Struct("=2Q")  # struct span_slot
SLOT_BYTES: Final = _SLOT.size


class SpanLayout(NamedTuple):
    """How the interpreter of this process keeps a span context (``struct span_layout``).

    Types are given by their addresses: what has another type is not followed. Offsets are in
    bytes from the start of an object, which is a count of references and then its type. Integers
    have a word that tells how many digits there are, and digits of 30 bits behind it.

    Attributes:
        span_context_type: of span contexts: tuples that begin with the trace id, the span id,
            whether the span is remote, and the flags, whose lowest bit says that it is sampled.
        token_type: of tokens (``contextvars.Token``).
        int_type: of the ids.
        flags_type: of the flags, which is made like ``int``.
        false_at: address of ``False``.
        items_at: offset of the first entry of a span context.
        token_context_at: offset of the context in a token.
        size_shift: bits below the number of digits.
        negative_bit: which of them says that an integer is negative; 0 if that shows in the number.
        unsampled: 1 if spans count, too, that are not sampled.
    """

    span_context_type: int
    token_type: int
    int_type: int
    flags_type: int
    false_at: int
    items_at: int
    token_context_at: int
    size_shift: int
    negative_bit: int
    unsampled: int


class SpanSlots:
    """Where each thread speaks of its span. Thread-safe.

    Args:
        slots_fd: the map.
        slots: number of its entries.
    """

    def __init__(self, slots_fd: int, slots: int) -> None:
        self._slots_fd = slots_fd
        self._slots = slots
        self._used: set[int] = set()
        self._lock = threading.RLock()

    def register(self, tid: int, said_at: int, context_at: int) -> bool:
        """Have the sampler look there for the span of a thread; False when all slots are taken.

        Args:
            tid: thread id in the pid namespace of this process (``threading.get_native_id()``).
            said_at: address of two pointers to objects: the context in which the span is current,
                or a token that was made in it, and the span context, or anything else if there is
                none (``struct said``). There is none while the thread changes the former.
            context_at: address of the pointer to the context that the thread is in.

        Raises:
            OSError: the kernel refused.
        """
        with self._lock:
            if tid not in self._used and len(self._used) == self._slots:
                return False
            value = _SLOT.pack(said_at, context_at)
            update_map(self._slots_fd, tid.to_bytes(4, "little"), value)
            self._used.add(tid)
            return True

    def release(self, tid: int) -> bool:
        """Look no more; to be called before the thread's memory is used for something else.

        Returns:
            Whether it had a slot; after :meth:`close` no thread has.
        """
        with self._lock:
            if tid not in self._used:
                return False
            self._used.remove(tid)
            delete_from_map(self._slots_fd, tid.to_bytes(4, "little"))
            return True

    def close(self) -> None:
        """Forget all threads and take no more; the map is closed by its owner."""
        with self._lock:
            self._slots = 0
            self._used.clear()

    def before_fork(self) -> None:
        """Hold the lock, which another thread would keep for ever in the child."""
        self._lock.acquire()

    def after_fork(self) -> None:
        """Let others have the lock again."""
        self._lock.release()
