"""Where threads publish the span that is current in them, for the sampler to copy.

One slot per thread in a mapped array: a change of span costs no system call.
"""

from __future__ import annotations

import mmap
import threading
from typing import Final

from otel_kprofiler.bpf.loader import delete_from_map, update_map

_SLOT_WORDS: Final = 4  # struct span_slot: sequence, trace id (2), span id
_SLOT_BYTES: Final = _SLOT_WORDS * 8
_LOW_HALF: Final = (1 << 64) - 1


class SpanSlots:
    """The slots of all threads. :meth:`register` and :meth:`release` are thread-safe."""

    def __init__(self, slots_fd: int, threads_fd: int, slots: int) -> None:
        self._threads_fd = threads_fd
        size = -(-slots * _SLOT_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._mapped = mmap.mmap(slots_fd, size, mmap.MAP_SHARED)
        self._words = memoryview(self._mapped).cast("Q")
        self._free = list(range(slots))
        self._used: dict[int, int] = {}
        self._lock = threading.Lock()

    def register(self, tid: int) -> SpanSlot | None:
        """A slot for a thread; None when all are taken.

        Args:
            tid: thread id in the initial pid namespace (``threading.get_native_id()`` unless
                the process lives in a namespace of its own).
        """
        with self._lock:
            index = self._used.get(tid)
            if index is None:
                if not self._free:
                    return None
                index = self._free.pop()
                self._used[tid] = index
            slot = SpanSlot(self._words, index)
            slot.clear()
            update_map(self._threads_fd, tid.to_bytes(4, "little"), index.to_bytes(4, "little"))
            return slot

    def release(self, tid: int) -> None:
        """Give back the slot of a thread that has ended; its :class:`SpanSlot` is dead."""
        with self._lock:
            index = self._used.pop(tid, None)
            if index is not None:
                delete_from_map(self._threads_fd, tid.to_bytes(4, "little"))
                self._free.append(index)

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._mapped.close()


class SpanSlot:
    """The slot of one thread; only that thread may write it (that is what makes it safe)."""

    __slots__ = ("_first", "_sequence", "_words")

    def __init__(self, words: memoryview, index: int) -> None:
        self._words = words
        self._first = index * _SLOT_WORDS
        self._sequence = 0

    def set(self, trace_id: int, span_id: int) -> None:
        """Publish a span, given as OpenTelemetry's 128-bit and 64-bit integers."""
        words, first = self._words, self._first
        self._sequence = sequence = self._sequence + 2
        words[first] = sequence - 1  # odd: an interrupt from here on finds no span
        words[first + 1] = trace_id >> 64
        words[first + 2] = trace_id & _LOW_HALF
        words[first + 3] = span_id
        words[first] = sequence

    def clear(self) -> None:
        """Publish that no span is current."""
        self.set(0, 0)
