"""Reads a BPF ring buffer through mmap(2), without further system calls.

See Documentation/bpf/ringbuf.rst and kernel/bpf/ringbuf.c. The mapping consists of a page with the
consumer's position, a page with the producer's position, and the data area twice, so that a record
that wraps around is contiguous. A record has an eight-byte header (length with two flag bits, page
offset), and is padded to a multiple of eight bytes.
"""

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
    """Memory barrier that orders earlier loads before later loads and stores (for arm64).

    In Python, only locks act as memory barriers. Taking a lock is an acquire operation, and
    releasing it a release operation.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Execute the memory barrier."""
        with self._lock:
            pass
        with self._lock:
            pass


class RingChunk(NamedTuple):
    """Records read from the ring.

    Attributes:
        data: committed records with their headers, as in the ring.
        complete: whether the chunk contains all records reserved up to the requested position.
    """

    data: bytes
    complete: bool


class RingMemory:
    """The mapped pages of a ring; tests replace this with an object with the same attributes."""

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
        # Each item of a cast memoryview is read and written as one machine word.
        self.consumer = memoryview(self._control)[:8].cast("Q")
        self.producer = memoryview(self._pages)[:8].cast("Q")
        self.data = memoryview(self._pages)[page:]

    def close(self) -> None:
        """Unmap the ring."""
        for view in (self.consumer, self.producer, self.data):
            view.release()
        self._control.close()
        self._pages.close()


class RingReader:
    """Reads records from a ring. Only one thread at a time may use a reader."""

    def __init__(self, memory: RingMemory, size: int) -> None:
        self._memory = memory
        self._mask = size - 1
        self._headers = memory.data.cast("I")
        self._order = Fence()

    def reserved(self) -> int:
        """Returns the producer's position, up to which records are reserved.

        The call also acts as a memory barrier for other mapped memory.
        """
        self._order()
        position = self._memory.producer[0]
        self._order()
        return position

    def is_empty(self) -> bool:
        """Returns whether all reserved records have been read."""
        return self.reserved() == self._memory.consumer[0]

    def take(self, until: int | None = None) -> RingChunk:
        """Read all committed records up to the first that is still being written.

        ``until`` is a position from :meth:`reserved`; the default is the current position.
        """
        memory, headers, mask = self._memory, self._headers, self._mask
        start = at = memory.consumer[0]
        producer = self.reserved() if until is None else until
        while at < producer:
            length = headers[(at & mask) >> 2]
            tries = _BUSY_TRIES
            while length & _BUSY and tries:
                # The kernel takes a few hundred nanoseconds to fill a reserved record.
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
    """Yields the bounds of submitted records. Raises ``ValueError`` if a record is truncated."""
    at = 0
    while at < len(data):
        start, end, at = next_record(data, at)
        if end:
            yield start, end


def next_record(data: bytes, at: int) -> tuple[int, int, int]:
    """Returns the bounds of a record whose header is at ``data[at]``, and the next header's offset.

    The bounds of a discarded record are zeros. Raises ``ValueError`` if the record is truncated.
    """
    if len(data) - at < RECORD_OVERHEAD:
        raise ValueError(f"a record's header is truncated at byte {at}")
    (length,) = _U32.unpack_from(data, at)
    start = at + RECORD_OVERHEAD
    following = start + ((length & _LENGTH) + 7 & ~7)
    if following > len(data) or length & _BUSY:
        raise ValueError(f"the record at byte {at} is truncated")
    return (
        (0, 0, following) if length & _DISCARD else (start, start + (length & _LENGTH), following)
    )


def ring_bytes(wanted: int) -> int:
    """Returns the smallest valid ring size (a power of 2 in pages) of at least ``wanted`` bytes."""
    return max(mmap.PAGESIZE, 1 << (wanted - 1).bit_length())
