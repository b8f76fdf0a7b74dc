"""Malformed pprof files raise the documented error, or yield samples that can be reported."""

import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.analysis import GROUPINGS, load_samples
from otel_kprofiler.errors import PayloadError
from otel_kprofiler.formats import FORMATS, parse_pprof
from otel_kprofiler.model import (
    KERNEL_SIDE,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    Stack,
    WindowSample,
)
from tests.windows import make_window

pytestmark = pytest.mark.fuzz


def whole():
    module = Module("vmlinux", ModuleKind.VMLINUX, None, FileId("ab" * 16), 0)
    line = Line("vfs_read", file="fs/read_write.c", line=450)
    stack = Stack.from_frames([Frame(module, 0x10, (line,), 0, KERNEL_SIDE)])
    samples = [WindowSample(stack, 7, "dd", 1, None, [10**18, 10**18 + 1])]
    group = {"process.pid": 7, "process.executable.name": "dd"}, samples
    (write,) = (row.write for row in FORMATS if row.name == "pprof")
    return gzip.decompress(write([make_window(10**18, 10**18 + 10, group, period_ns=10**7)]))


WHOLE = whole()
PLACES = st.integers(0, len(WHOLE) - 1)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(PLACES, st.integers(0, 255)), min_size=1, max_size=4), PLACES)
def test_malformed_pprof_files_are_rejected_or_yield_consistent_reports(changes, cut):
    data = bytearray(WHOLE)
    for place, byte in changes:
        data[place] = byte
    for damaged in (bytes(data), bytes(data[:cut])):
        try:
            windows = parse_pprof(damaged)
        except PayloadError:
            continue
        samples = load_samples(windows)
        for group in GROUPINGS.values():
            assert sum(one.own for one in group(samples)) == sum(samples.weights())
        for row in FORMATS:
            row.write(samples.windows())
