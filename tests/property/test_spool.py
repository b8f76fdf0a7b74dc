"""Intact records of a spool are recovered even if its files are corrupt.

The oracle knows the bytes of every written record and searches for them in the corrupt files,
without a parser or checksums.
"""

import json
import os
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.export import Spool
from otel_kprofiler.export.segments import MAGIC
from otel_kprofiler.model import Batch, Form, ProfileSamples, SampleCounts

SECOND = 1_000_000_000
KINDS = ("on_cpu", "k0", "k1", "k2")

# A step appends a payload of the given number of bytes, or settles the oldest batch.
STEPS = st.lists(st.one_of(st.integers(0, 400), st.just("settle")), min_size=1, max_size=14)
DAMAGE = st.lists(
    st.tuples(
        st.sampled_from(["flip", "zero", "cut", "insert", "repeat", "remove", "lose the segment"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 80),
        st.integers(0, 20),
    ),
    max_size=4,
)
FIELD = st.integers(0, 2**64 - 1)


class Written:
    """The content of a spool: every record as bytes and in decoded form."""

    def __init__(self, path, steps, *, close):
        self.records = []  # (bytes, batch or None, totals or None)
        spool = Spool(path, max_bytes=4000, fsync=False)
        write = spool._write

        def noting(kind, body):
            offset = write(kind, body)
            with open(Path(path, f"{spool._segment:020}.spool"), "rb") as file:
                file.seek(offset)
                self.records.append([file.read(), None, json.loads(body) if kind != 1 else None])
            return offset

        spool._write = noting
        waiting, self.appended = [], SampleCounts()
        spool._begin_segment()  # a new segment, to capture all of its records
        for number, step in enumerate(steps, start=1):
            if step == "settle":
                if waiting:
                    stored = waiting.pop(0)
                    spool.settle(stored.number, stored.samples)
                continue
            payload = (b"%d:\0\1\2{" % number) * (step // 6)
            profiles = (ProfileSamples("on_cpu", number), ProfileSamples(f"k{number % 3}", 1))
            batch = Batch(payload, Form.PROTOBUF, profiles, 5, number * SECOND)
            stored = spool.append(batch)
            waiting.append(stored)
            self.appended += batch.sample_counts
            self.records[-1][1:] = (stored.number, batch), {"appended": self.appended.copy()}
        if close:
            spool.close()
        else:
            spool._release()

    def expect(self, files):
        """Returns the batches, lost samples and appended samples expected from intact records."""
        whole = [record for record in self.records if any(record[0] in data for data in files)]
        headers = [record[2] for record in whole]
        settled = max((header.get("settled", 0) for header in headers), default=0)
        done, appended = (
            {
                kind: max([header.get(key, {}).get(kind, 0) for header in headers], default=0)
                for kind in KINDS
            }
            for key in ("done", "appended")
        )
        batches = {record[1][0]: record[1][1] for record in whole if record[1]}
        kept = [batches[number] for number in sorted(batches) if number > settled]
        damaged = {
            kind: max(
                0, appended[kind] - done[kind] - sum(batch.sample_counts[kind] for batch in kept)
            )
            for kind in KINDS
        }
        return kept, SampleCounts(damaged), SampleCounts(appended)


def harm(directory, kind, where, length, value):
    """Corrupts a segment, but not the version in its magic number."""
    paths = sorted(directory.glob("*.spool"))
    if not paths:
        return
    path = paths[int(where * len(paths))]
    data = path.read_bytes()
    at = int(where * len(paths) % 1 * len(data))
    if kind == "lose the segment":
        path.unlink()
        return
    middle = data[at : at + length]
    data = data[:at] + {
        "flip": bytes(byte ^ (value or 1) for byte in middle),
        "zero": bytes(len(middle)),
        "cut": b"",
        "insert": bytes([value]) * length + middle,
        "repeat": middle + middle,
        "remove": b"",
    }[kind] + (b"" if kind == "cut" else data[at + length :])  # fmt: skip
    if data[:7] == MAGIC[:7] and len(data) > 7:
        data = MAGIC + data[8:]
    path.write_bytes(data)


@settings(deadline=None, max_examples=300)
@given(STEPS, DAMAGE, st.booleans())
def test_a_corrupt_spool_keeps_intact_records_and_counts_lost_samples(steps, damages, close):
    with tempfile.TemporaryDirectory() as directory:
        written = Written(directory, steps, close=close)
        for damage in damages:
            harm(Path(directory), *damage)
        files = [path.read_bytes() for path in Path(directory).glob("*.spool")]
        kept, damaged, known = written.expect(files)
        spool = Spool(directory, max_bytes=4000, fsync=False)
        assert [spool.read(stored).payload for stored in spool.waiting] == [
            batch.payload for batch in kept
        ]
        assert spool.damaged == damaged
        assert known == written.appended or spool.unknown_since_unix_ns or not files
        fresh = spool.append(Batch(b"fresh", Form.PROTOBUF, (ProfileSamples("on_cpu", 1),), 5, 6))
        assert all(stored.number < fresh.number for stored in spool.waiting)
        spool.close()
        again = Spool(directory, max_bytes=4000, fsync=False)
        assert len(again.waiting) == len(kept) + 1
        assert (again.damaged, again.unknown_since_unix_ns) == ({}, 0)
        again.close()


@settings(deadline=None, max_examples=500)
@given(st.lists(st.one_of(st.just(MAGIC), st.binary(max_size=60), FIELD), max_size=30))
def test_spool_files_with_arbitrary_content_cause_no_error(parts):
    content = b"".join(
        part if isinstance(part, bytes) else part.to_bytes(8, "little") for part in parts
    )
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, f"{1:020}.spool").write_bytes(content)
        spool = Spool(directory, fsync=False)
        assert not spool.waiting
        spool.append(Batch(b"fresh", Form.PROTOBUF, (ProfileSamples("on_cpu", 1),), 5, 6))
        spool.close()
        again = Spool(directory, fsync=False)
        assert len(again.waiting) == 1
        again.close()
        assert len(os.listdir(directory)) <= 4
