"""Reads and writes spool segments: checksummed records after a magic number.

A record consists of the CRC-32 of all following fields (4 bytes), the length of the body (4), the
kind (1) and the body. All integers are little-endian. The body of a batch consists of the batch
number (8 bytes), the length of the head (4 bytes), the head and the payload. The head of a batch
and the bodies of all other records are JSON; see :func:`pack_batch` and :class:`Totals`. Samples
are counted by the name of their kind. A corrupt record does not affect other records.
"""

from __future__ import annotations

import enum
import json
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Final, NamedTuple

from otel_kprofiler.model import Batch, Form, LossCause, Losses, ProfileSamples, SampleCounts

MAGIC: Final = b"kpspool2"

_HEADER: Final = struct.Struct("<IIB")
_CHECKED: Final = struct.Struct("<IB")
_BATCH: Final = struct.Struct("<QI")
MAX_BODY_BYTES: Final = 1 << 28
"""Maximum length of a record's body, in bytes: twice the upper limit for ``max_message_bytes``."""
MAX_NUMBER: Final = 1 << 62
"""Limit on batch and segment numbers, far below the maximum of their fields."""
_MAX_TOTALS_BYTES: Final = 1 << 16
"""Maximum length of a totals record, in bytes; 18 kinds with 4 causes of loss need 4 KiB."""
_MAX_COUNT: Final = 1 << 63
_CAUSES: Final = {cause.value: cause for cause in LossCause}
_CANDIDATE: Final = re.compile(rb"[\0-\x3f](?=\x01|[\x02\x03]\{)", re.DOTALL)
"""Matches the high byte of a length followed by a record kind, as in a record header."""
_CANDIDATE_AT: Final = 7
_MAX_CHECKED: Final = 16
"""Limit on bytes checksummed in a corrupt segment, as a multiple of the segment's size."""

HEADER_BYTES: Final = _HEADER.size


class Kind(enum.IntEnum):
    """The kind of a record."""

    BATCH = 1
    MARK = 2
    CLOSE = 3


class Record(NamedTuple):
    """A record in a segment; ``offset`` is the position of the record's header in the file."""

    kind: int
    body: bytes
    offset: int

    @property
    def size(self) -> int:
        """Returns the size of the record in the file, in bytes."""
        return HEADER_BYTES + len(self.body)


class StoredBatch(NamedTuple):
    """A batch as stored in a segment.

    Attributes:
        number: position of the batch in the spool; ascending, never reused.
        before: number of samples appended before the batch, by kind.
        rest: number of samples in later batches of the same window, by kind.
    """

    number: int
    before: SampleCounts
    put_unix_ns: int
    batch: Batch
    rest: SampleCounts = SampleCounts()


@dataclass(slots=True)
class Totals:
    """Monotonic sample totals over the spool's lifetime, as stored in *mark* records.

    Attributes:
        settled: number of the last batch that was delivered or lost.
        end_unix_ns: end of the last appended window, as Unix time.
        done: samples exported or counted as lost, by kind.
        appended: all samples appended so far, by kind.
        lost: samples in ``done`` that were lost, by kind and cause; see :func:`name_losses`.
        aside: samples in ``done`` from segments written by other versions, by kind.
    """

    settled: int = 0
    end_unix_ns: int = 0
    done: SampleCounts = field(default_factory=SampleCounts)
    appended: SampleCounts = field(default_factory=SampleCounts)
    lost: SampleCounts = field(default_factory=SampleCounts)
    aside: SampleCounts = field(default_factory=SampleCounts)

    def pack(self) -> bytes:
        """Encode the totals as the body of a *mark* record."""
        values = {total.name: getattr(self, total.name) for total in fields(self)}
        return json.dumps(values).encode()

    def include(self, other: Totals) -> None:
        """Merge ``other`` into these totals, keeping the maximum of each value."""
        self.settled = max(self.settled, other.settled)
        self.end_unix_ns = max(self.end_unix_ns, other.end_unix_ns)
        self.done |= other.done
        self.appended |= other.appended
        self.lost |= other.lost
        self.aside |= other.aside


def name_losses(kind: str, losses: Losses) -> SampleCounts:
    """Returns the losses for a kind as they are stored, with keys of the form ``KIND/CAUSE``."""
    return SampleCounts({f"{kind}/{cause.value}": count for cause, count in losses.items()})


def split_losses(lost: SampleCounts) -> dict[str, dict[LossCause, int]]:
    """Inverts :func:`name_losses` for all kinds. Unknown causes count as spool corruption."""
    kinds: dict[str, dict[LossCause, int]] = {}
    for name, count in lost.items():
        kind, _, value = name.rpartition("/")
        cause = _CAUSES.get(value, LossCause.SPOOL_DAMAGED)
        of_kind = kinds.setdefault(kind, {})
        of_kind[cause] = of_kind.get(cause, 0) + count
    return kinds


def pack_record(kind: Kind, body: bytes) -> bytes:
    """Encode a record."""
    checked = _CHECKED.pack(len(body), kind) + body
    return zlib.crc32(checked).to_bytes(4, "little") + checked


def parse_record(data: bytes, offset: int = 0) -> Record | None:
    """Returns the record at an offset; None if it is corrupt or truncated."""
    start = offset + HEADER_BYTES
    if start > len(data):
        return None
    crc, length, kind = _HEADER.unpack_from(data, offset)
    if length > min(len(data) - start, MAX_BODY_BYTES):
        return None
    if zlib.crc32(memoryview(data)[offset + 4 : start + length]) != crc:
        return None
    return Record(kind, data[start : start + length], offset)


def find_other_version(data: bytes) -> str:
    """Returns the magic number if a different version wrote the segment; otherwise empty."""
    magic = data[: len(MAGIC)]
    is_supported = len(magic) < len(MAGIC) or magic == MAGIC or magic[:-1] != MAGIC[:-1]
    return "" if is_supported else magic.decode("ascii", "backslashreplace")


def find_records(data: bytes, segment: int) -> Iterator[Record]:
    """Yields a segment's intact records in order, skipping corrupt data between them.

    ``segment`` is the number in the segment's file name: the lowest batch number in the segment.
    """
    at = len(MAGIC) if data.startswith(MAGIC) else 0
    budget = _MAX_CHECKED * len(data)
    while at < len(data):
        record = parse_record(data, at)
        if record is None:
            record, budget = _find_next(data, at + 1, segment, budget)
        if record is None:
            return
        yield record
        at = record.offset + record.size


def _find_next(data: bytes, at: int, segment: int, budget: int) -> tuple[Record | None, int]:
    """Returns the first intact record at or after an offset, and the remaining checksum budget."""
    last = segment + len(data) // HEADER_BYTES
    for match in _CANDIDATE.finditer(data, at + _CANDIDATE_AT):
        offset = match.start() - _CANDIDATE_AT
        start = offset + HEADER_BYTES
        _, length, kind = _HEADER.unpack_from(data, offset)
        if length > min(len(data) - start, budget):
            continue
        if kind == Kind.BATCH and (
            length < _BATCH.size or not segment <= _BATCH.unpack_from(data, start)[0] <= last
        ):
            continue
        budget -= length
        record = parse_record(data, offset)
        if record:
            return record, budget
    return None, budget


def pack_batch(stored: StoredBatch) -> bytes:
    """Encode the body of a batch record."""
    batch = stored.batch
    head = json.dumps(
        {
            "before": stored.before,
            "put_unix_ns": stored.put_unix_ns,
            "start_unix_ns": batch.start_unix_ns,
            "end_unix_ns": batch.end_unix_ns,
            "form": batch.form.value,
            "profiles": batch.profiles,
            **({"rest": stored.rest} if stored.rest else {}),
        },
        separators=(",", ":"),
    ).encode()
    return b"".join((_BATCH.pack(stored.number, len(head)), head, batch.payload))


def unpack_batch(body: bytes) -> StoredBatch:
    """Inverts :func:`pack_batch`; raises ``ValueError`` if the format differs."""
    if len(body) < _BATCH.size:
        raise ValueError("the batch is too short")
    number, length = _BATCH.unpack_from(body)
    end = _BATCH.size + length
    if end > len(body) or number >= MAX_NUMBER:
        raise ValueError("the batch has an invalid sequence number or length")
    head = _load(body[_BATCH.size : end])
    profiles = head.get("profiles")
    if not isinstance(profiles, list):
        raise ValueError("the profiles are not a list")  # noqa: TRY004 - data, not a type
    batch = Batch(
        payload=body[end:],
        form=Form(head.get("form")),
        profiles=tuple(map(_read_profile, profiles)),
        start_unix_ns=_read_count(head.get("start_unix_ns")),
        end_unix_ns=_read_count(head.get("end_unix_ns")),
    )
    earlier = _read_counts(head.get("before"))
    rest = _read_counts(head.get("rest", {}))
    return StoredBatch(number, earlier, _read_count(head.get("put_unix_ns")), batch, rest)


def unpack_totals(body: bytes) -> Totals:
    """Inverts :meth:`Totals.pack`, ignoring unknown keys.

    Raises ``ValueError`` if the record is malformed.
    """
    if len(body) > _MAX_TOTALS_BYTES:
        raise ValueError("the totals record is too long")
    values = _load(body)
    settled = _read_count(values.get("settled", 0))
    if settled >= MAX_NUMBER:
        raise ValueError("the number of the last settled batch is out of range")
    return Totals(
        settled=settled,
        end_unix_ns=_read_count(values.get("end_unix_ns", 0)),
        done=_read_counts(values.get("done", {})),
        appended=_read_counts(values.get("appended", {})),
        lost=_read_counts(values.get("lost", {})),
        aside=_read_counts(values.get("aside", {})),
    )


def _load(data: bytes) -> dict[str, object]:
    try:
        values = json.loads(data)
    except RecursionError:
        values = None
    if not isinstance(values, dict):
        raise ValueError("the record is not a mapping")  # noqa: TRY004 - data, not a type
    return values


def _read_profile(value: object) -> ProfileSamples:
    match value:
        case [str(kind), samples]:
            return ProfileSamples(kind, _read_count(samples))
    raise ValueError("a profile record is not a (kind, count) pair")


def _read_counts(value: object) -> SampleCounts:
    if not isinstance(value, dict):
        raise ValueError("the sample counts are not a mapping")  # noqa: TRY004 - data, not a type
    return SampleCounts({kind: _read_count(count) for kind, count in value.items()})


def _read_count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise ValueError("a count is not a number, or is out of range")
    return value
