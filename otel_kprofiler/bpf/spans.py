"""Where threads publish the span that is current in them, for the sampler to copy.

One slot per thread in a mapped array: a change of span costs no system call.
"""

from __future__ import annotations

import mmap
import threading
from typing import Final

from otel_kprofiler.bpf.loader import delete_from_map, update_map

_SLOT_WORDS: Final = 5  # struct span_slot: span id, trace id (2), address, context
SLOT_BYTES: Final = _SLOT_WORDS * 8
_LOW_HALF: Final = (1 << 64) - 1


class SpanSlots:
    """The slots of all threads. :meth:`register` and :meth:`release` are thread-safe."""

    def __init__(self, slots_fd: int, threads_fd: int, slots: int) -> None:
        self._threads_fd = threads_fd
        size = -(-slots * SLOT_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._words = memoryview(mmap.mmap(slots_fd, size, mmap.MAP_SHARED)).cast("Q")
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
            first = index * _SLOT_WORDS
            slot = SpanSlot(self._words[first : first + _SLOT_WORDS])
            slot.clear()
            slot.bind(0, 0)
            update_map(self._threads_fd, tid.to_bytes(4, "little"), index.to_bytes(4, "little"))
            return slot

    def release(self, tid: int) -> bool:
        """Give back the slot of a thread that has ended; its :class:`SpanSlot` is dead.

        Returns:
            Whether it had one; after :meth:`close` no thread has.
        """
        with self._lock:
            index = self._used.pop(tid, None)
            if index is not None:
                delete_from_map(self._threads_fd, tid.to_bytes(4, "little"))
                self._free.append(index)
            return index is not None

    def close(self) -> None:
        """Forget the memory; it is unmapped when the last :class:`SpanSlot` is gone."""
        self._words = memoryview(b"").cast("Q")
        self._used.clear()
        self._free.clear()


class SpanSlot:
    """The slot of one thread; only that thread may write it (that is what makes it safe).

    Attributes:
        words: the slot as 64-bit words (``struct span_slot``): span id, high and low half of
            the trace id, then what :meth:`bind` sets. Who writes them directly, for speed,
            writes a span id of 0 before any other word changes, and the new one last.
    """

    __slots__ = ("words",)

    def __init__(self, words: memoryview) -> None:
        self.words = words

    def set(self, trace_id: int, span_id: int) -> None:
        """Publish a span, given as OpenTelemetry's 128-bit and 64-bit integers."""
        words = self.words
        words[0] = 0  # an interrupt from here on finds no span
        words[1] = trace_id >> 64
        words[2] = trace_id & _LOW_HALF
        words[0] = span_id

    def clear(self) -> None:
        """Publish that no span is current."""
        self.words[0] = 0

    def bind(self, context_at: int, context: int) -> None:
        """Let the span count only while the word at ``context_at`` equals ``context``.

        Args:
            context_at: an address in this process; 0: it always counts.
            context: what is there while the span is current.
        """
        self.words[0] = 0
        self.words[3] = context_at
        self.words[4] = context
