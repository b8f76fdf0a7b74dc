"""The ring reader reads synthetic ring memory correctly."""

import mmap
import struct

import pytest

from otel_kprofiler.bpf import RingReader, record_spans, ring_bytes

SIZE = 4096
BUSY, DISCARD = 1 << 31, 1 << 30


class SyntheticRing:
    """A substitute for ``RingMemory`` that tests write to as the kernel does."""

    def __init__(self, position: int = 0) -> None:
        self.positions = bytearray(16)
        self.consumer = memoryview(self.positions)[:8].cast("Q")
        self.producer = memoryview(self.positions)[8:].cast("Q")
        self.content = bytearray(2 * SIZE)
        self.data = memoryview(self.content)
        self.consumer[0] = self.producer[0] = position

    def reserve(self, length: int) -> int:
        at = self.producer[0]
        self.write(at, struct.pack("=II", length | BUSY, 0))
        self.producer[0] = at + 8 + (length + 7 & ~7)
        return at

    def commit(self, at: int, payload: bytes, flags: int = 0) -> None:
        self.write(at + 8, payload)
        self.write(at, struct.pack("=II", len(payload) | flags, 0))

    def put(self, payload: bytes, flags: int = 0) -> None:
        self.commit(self.reserve(len(payload)), payload, flags)

    def write(self, at: int, data: bytes) -> None:
        """Writes data to both copies of the ring, at the same position."""
        for index, byte in enumerate(data):
            self.content[(at + index) % SIZE] = self.content[(at + index) % SIZE + SIZE] = byte

    def close(self) -> None:
        for view in (self.consumer, self.producer, self.data):
            view.release()


def payloads(data: bytes) -> list[bytes]:
    return [data[start:end] for start, end in record_spans(data)]


def test_committed_records_are_read_once_and_their_space_is_released():
    ring = SyntheticRing()
    reader = RingReader(ring, SIZE)
    ring.put(b"a" * 13)
    ring.put(b"b" * 8)
    data, complete = reader.take()
    assert payloads(data) == [b"a" * 13, b"b" * 8]
    assert complete
    assert ring.consumer[0] == ring.producer[0] == 8 + 16 + 8 + 8
    assert reader.take() == (b"", True)


@pytest.mark.parametrize("short_of_the_end", range(0, 64, 8))
def test_records_are_intact_where_the_ring_wraps_around(short_of_the_end):
    """The ring's pages may end before a record, in its header or in its data."""
    ring = SyntheticRing(position=5 * SIZE - short_of_the_end)
    reader = RingReader(ring, SIZE)
    ring.put(b"0123456789abcdef" * 2)
    ring.put(b"next")
    assert payloads(reader.take().data) == [b"0123456789abcdef" * 2, b"next"]


def test_a_full_ring_is_read_completely():
    ring = SyntheticRing(position=SIZE + 24)
    reader = RingReader(ring, SIZE)
    for number in range(SIZE // 64):
        ring.put(bytes([number]) * 56)
    assert payloads(reader.take().data) == [bytes([n]) * 56 for n in range(SIZE // 64)]


def test_the_reader_stops_at_an_uncommitted_record():
    ring = SyntheticRing()
    reader = RingReader(ring, SIZE)
    ring.put(b"done")
    open_record = ring.reserve(24)
    ring.put(b"after")
    data, complete = reader.take()
    assert payloads(data) == [b"done"]
    assert not complete, "what lies behind the open record may be older than the clock says"
    assert reader.take() == (b"", False)
    ring.commit(open_record, b"x" * 24)
    data, complete = reader.take()
    assert payloads(data) == [b"x" * 24, b"after"]
    assert complete


def test_discarded_ring_records_are_skipped():
    ring = SyntheticRing()
    reader = RingReader(ring, SIZE)
    ring.put(b"kept")
    ring.put(b"discarded", DISCARD)
    ring.put(b"kept too")
    assert payloads(reader.take().data) == [b"kept", b"kept too"]


def test_closing_releases_the_mapping():
    ring = SyntheticRing()
    RingReader(ring, SIZE).close()
    ring.positions.clear()  # raises BufferError if a view still exists


@pytest.mark.parametrize(
    "chunk",
    [
        b"\x08\0\0\0",
        struct.pack("=II", 16, 0) + b"short",
        struct.pack("=II", 8 | BUSY, 0) + b"8" * 8,
    ],
    ids=["header truncated", "record truncated", "never committed"],
)
def test_a_truncated_chunk_of_ring_data_is_rejected(chunk):
    with pytest.raises(ValueError, match="truncated"):
        list(record_spans(chunk))


@pytest.mark.parametrize(
    ("wanted", "size"), [(1, mmap.PAGESIZE), (mmap.PAGESIZE, mmap.PAGESIZE), (70_000, 131_072)]
)
def test_the_ring_size_is_rounded_up_to_a_power_of_two_number_of_pages(wanted, size):
    assert ring_bytes(wanted) == size
