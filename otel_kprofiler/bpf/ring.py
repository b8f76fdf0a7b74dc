"""Reader of a BPF ring buffer by mmap, without system calls.

Layout and rules: Documentation/bpf/ringbuf.rst, kernel/bpf/ringbuf.c. The kernel maps one
page with the consumer's position, one with the producer's, then the data twice in a row, so
that a record that wraps around can be read straight on. A record is eight bytes of header
(length with two flag bits, page offset) and the data, padded to eight bytes.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterator
from typing import Final, NamedTuple

RECORD_OVERHEAD: Final = 8
_BUSY: Final = 1 << 31
_DISCARD: Final = 1 << 30
_LENGTH: Final = _DISCARD - 1
_BUSY_TRIES: Final = 64
_U32: Final = struct.Struct("=I")


class Fence:
    """Keeps loads before it from moving behind loads and stores after it (arm64).

    A lock is released with release and taken with acquire order; Python offers no other
    memory barrier.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """The barrier."""
        with self._lock:
            pass
        with self._lock:
            pass


class RingChunk(NamedTuple):
    """What was taken from the ring.

    Attributes:
        data: committed records as they lie in the ring, headers included.
        complete: everything that was reserved up to the position where it ends is in it.
    """

    data: bytes
    complete: bool


class RingMemory:
    """The mapped pages of a ring; tests give others with the same attributes."""

    def __init__(self, map_fd: int, size: int) -> None:
        page = mmap.PAGESIZE
        self._control = mmap.mmap(map_fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            self._pages = mmap.mmap(
                map_fd, page + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
            )
        except BaseException:
            self._control.close()
            raise
        # Items of a cast memoryview are read and written as one machine word.
        self.consumer = memoryview(self._control)[:8].cast("Q")
        self.producer = memoryview(self._pages)[:8].cast("Q")
        self.data = memoryview(self._pages)[page:]

    def close(self) -> None:
        """Unmap."""
        for view in (self.consumer, self.producer, self.data):
            view.release()
        self._control.close()
        self._pages.close()


class RingReader:
    """Takes records out of a ring; for one thread at a time.

    Args:
        memory: the mapped ring.
        size: bytes of data, a power of two.
    """

    def __init__(self, memory: RingMemory, size: int) -> None:
        self._memory = memory
        self._mask = size - 1
        self._headers = memory.data.cast("I")
        self._order = Fence()

    def reserved(self) -> int:
        """The position up to which records are reserved; a barrier for other mapped memory."""
        self._order()
        position = self._memory.producer[0]
        self._order()
        return position

    def take(self, until: int | None = None) -> RingChunk:
        """Take all committed records, up to the first that is still being written.

        Args:
            until: a position of :meth:`reserved` to stop at; that of this moment by default.
        """
        memory, headers, mask = self._memory, self._headers, self._mask
        start = at = memory.consumer[0]
        producer = self.reserved() if until is None else until
        while at < producer:
            length = headers[(at & mask) >> 2]
            tries = _BUSY_TRIES
            while length & _BUSY and tries:
                # The kernel copies into a reserved record for some hundred nanoseconds.
                length = headers[(at & mask) >> 2]
                tries -= 1
            if length & _BUSY:
                break
            at += RECORD_OVERHEAD + ((length & _LENGTH) + 7 & ~7)
        if at == start:
            return RingChunk(b"", at == producer)
        self._order()
        first = start & mask
        data = bytes(memory.data[first : first + at - start])
        self._order()
        memory.consumer[0] = at
        return RingChunk(data, at == producer)

    def close(self) -> None:
        """Unmap the ring."""
        self._headers.release()
        self._memory.close()


def record_spans(data: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each record in a chunk, without discarded ones. Raises ``ValueError``."""
    at, end = 0, len(data)
    while at < end:
        if end - at < RECORD_OVERHEAD:
            raise ValueError(f"a record's header is cut off at byte {at}")
        (length,) = _U32.unpack_from(data, at)
        following = at + RECORD_OVERHEAD + ((length & _LENGTH) + 7 & ~7)
        if following > end or length & _BUSY:
            raise ValueError(f"the record at byte {at} is cut off")
        if not length & _DISCARD:
            yield at + RECORD_OVERHEAD, at + RECORD_OVERHEAD + (length & _LENGTH)
        at = following


def ring_bytes(wanted: int) -> int:
    """The smallest size of a ring that holds ``wanted`` bytes: a power of two of pages."""
    return max(mmap.PAGESIZE, 1 << (wanted - 1).bit_length())
