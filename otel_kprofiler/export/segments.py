"""The form of a spool's segments: checksummed records behind a magic number.

A segment is :data:`MAGIC` and records. A record is the CRC-32 of what follows it (4 bytes), the
length of the body (4), the kind (1) and the body; all integers are little-endian. The body of a
batch is its number, the samples that were appended before it, when it was put in (Unix ns), start
and end of its window (8 each), its form (1), the number of profiles (4), the samples of each (4
each), and the payload. Other bodies are JSON.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, Final, NamedTuple

from otel_kprofiler.model import Batch, Form

MAGIC: Final = b"kpspool1"

_HEADER: Final = struct.Struct("<IIB")
_CHECKED: Final = struct.Struct("<IB")
_BATCH: Final = struct.Struct("<QQQQQBI")
_FORMS: Final = tuple(Form)
_MAX_BODY_BYTES: Final = 1 << 30

HEADER_BYTES: Final = _HEADER.size


class Kind(enum.IntEnum):
    """What a record is."""

    BATCH = 1
    MARK = 2
    CLOSE = 3


class Record(NamedTuple):
    """A record as it was found; ``offset`` is that of its header in the file."""

    kind: int
    body: bytes
    offset: int

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return HEADER_BYTES + len(self.body)


class StoredBatch(NamedTuple):
    """A batch with its number, the samples appended before it, and when it was put in."""

    number: int
    before: int
    put_unix_ns: int
    batch: Batch


def pack_record(kind: Kind, body: bytes) -> bytes:
    """A record as it is written."""
    checked = _CHECKED.pack(len(body), kind) + body
    return zlib.crc32(checked).to_bytes(4, "little") + checked


def read_records(file: BinaryIO) -> Iterator[Record]:
    """Records from the file's position up to the end, or to the first that is damaged."""
    offset = file.tell()
    while True:
        header = file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            return
        crc, length, kind = _HEADER.unpack(header)
        body = file.read(length) if length <= _MAX_BODY_BYTES else b""
        if len(body) < length or zlib.crc32(body, zlib.crc32(header[4:])) != crc:
            return
        record = Record(kind, body, offset)
        yield record
        offset += record.size


def pack_batch(stored: StoredBatch) -> bytes:
    """The body of a batch's record."""
    number, before, put_unix_ns, batch = stored
    counts = batch.profile_samples
    head = _BATCH.pack(
        number, before, put_unix_ns, batch.start_unix_ns, batch.end_unix_ns,
        _FORMS.index(batch.form), len(counts),
    )  # fmt: skip
    return b"".join((head, struct.pack(f"<{len(counts)}I", *counts), batch.payload))


def unpack_batch(body: bytes) -> StoredBatch:
    """Inverse of :func:`pack_batch`, for a body whose checksum was right."""
    number, before, put, start, end, form, profiles = _BATCH.unpack_from(body)
    at = _BATCH.size + 4 * profiles
    counts = struct.unpack_from(f"<{profiles}I", body, _BATCH.size)
    return StoredBatch(number, before, put, Batch(body[at:], _FORMS[form], counts, start, end))
