"""Untrusted perf.data files are read at low cost, or rejected with a reason."""

import contextlib
import gzip
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.analysis import load_samples
from otel_kprofiler.errors import PayloadError
from otel_kprofiler.perf_data import read_perf_data
from tests.fuzz.bounds import READ, REFUSED, read_within
from tests.unit.test_perf_data import NoNames

pytestmark = pytest.mark.fuzz

DATA = Path(__file__).parents[1] / "data" / "perf"
FILES = [gzip.decompress(path.read_bytes()) for path in sorted(DATA.glob("*.data.gz"))]
EXTREME = st.sampled_from([0, 1, 7, 8, 2**15, 2**31, 2**32 - 1, 2**63, 2**64 - 1])


def read(data):
    problems = []
    (window,) = read_perf_data(data, 10**18, problems.append, NoNames())
    assert window.sample_count
    load_samples([window])
    return problems


@st.composite
def damaged(draw):
    data = bytearray(draw(st.sampled_from(FILES)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(8, len(data) - 8) | st.integers(8, 200))
        size = draw(st.sampled_from("BHIQ"))
        number = draw(EXTREME | st.integers(0, 2**64 - 1))
        number &= (1 << 8 * struct.calcsize(size)) - 1
        struct.pack_into(f"<{size}", data, at, number)
    return bytes(data[: draw(st.integers(16, len(data)) | st.just(len(data)))])


@settings(max_examples=150, deadline=None)
@given(damaged())
def test_corrupt_perf_data_files_are_partially_read_or_rejected(data):
    try:
        read(data)
    except PayloadError as error:
        assert error.message  # noqa: PT017 - any other error fails


@pytest.mark.parametrize("whole", FILES)
def test_truncated_perf_data_files_are_partially_read_or_rejected(whole):
    def read_all():
        for end in range(16, len(whole), len(whole) // 60):
            with contextlib.suppress(PayloadError):
                read(whole[:end])

    assert read_within(read_all, mebibytes=64) == READ


def test_forked_processes_with_many_mappings_use_little_memory():
    """Each of 2,000 processes inherits 8,000 mappings and adds another."""

    def record(type_, body):
        return struct.pack("<IHH", type_, 2, 8 + len(body)) + body

    def mapping(pid, start):
        return record(1, struct.pack("<IIQQQ", pid, pid, start, 16, 0) + b"/a\0\0\0\0\0\0")

    records = [mapping(1, 16 * at) for at in range(8_000)]
    for pid in range(2, 2_000):
        records += [record(7, struct.pack("<IIIIQ", pid, 1, pid, 1, 0)), mapping(pid, 0)]
    body = b"".join(records)
    attr = struct.pack("<IIQQQQQ", 1, 64, 0, 1, 1, 0, 0) + bytes(16)
    sections = struct.pack("<QQQQQQQ", 104, 80, 104, 80, 184, len(body), 0)
    data = b"PERFILE2" + sections + bytes(104 - 8 - len(sections)) + attr + bytes(16)
    data = data[:184].ljust(184, b"\0") + body
    assert read_within(lambda: read(data), mebibytes=512) == REFUSED
