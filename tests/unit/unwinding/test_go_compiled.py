"""The compiled loop over Go functions yields the same entries and errors as the Python version."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.speedups import add_go_functions, library_problem, pack_pairs
from otel_kprofiler.unwinding import go_frames
from otel_kprofiler.unwinding.frame_writing import COUNT, Segment, pack_tables
from otel_kprofiler.unwinding.go_table import Code
from tests.unit.unwinding.go_files import ORDINARY, PUSH, TEXT, Made, go_file

pytestmark = pytest.mark.skipif(library_problem is not None, reason=str(library_problem))

ADDRESS = 0x700000
NAMES = (b"main.f", b"runtime.asyncPreempt", b"runtime.systemstack", b"runtime.sigtramp")
DISTANCES = (1, 2, 14, 63, 64, 65, 127, 128, 300, 70_000)
DEPTHS = (0, 0, 8, 40, 120, 1 << 14, 1 << 20, -8)
VALUES = (0, 1, 2, 0x7F, 0x80, 0xFF, 1 << 31, (1 << 32) - 1, 1 << 63)
SIGRETURN = bytes.fromhex("48c7c00f0000000f05")


@st.composite
def functions(draw):
    steps = draw(st.lists(st.sampled_from(DISTANCES), min_size=1, max_size=6))
    depths = [0, *(draw(st.sampled_from(DEPTHS)) for _ in steps[1:])]
    sizes = tuple((sum(steps[: at + 1]), depth) for at, depth in enumerate(depths))
    code = bytearray(draw(st.sampled_from([PUSH, bytes(9), SIGRETURN])) + bytes(80))
    code[sizes[0][0] - 1 : sizes[0][0]] = draw(st.sampled_from([b"\x55", b"\x90"]))
    flags = draw(st.sampled_from([0, 0, 0, 1, 2, 4, 5, 6]))
    return Made(draw(st.sampled_from(NAMES)), bytes(code[:80]), sizes, flags)


@st.composite
def go_files(draw):
    """Draws a Go file, whose table may be damaged, and the address of its unwind entries."""
    file, table, segments = go_file(
        [*[ORDINARY] * 8, *draw(st.lists(functions(), min_size=1, max_size=6))]
    )
    data = bytearray(file)
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        size = draw(st.sampled_from([1, 2, 4, 8]))
        at = table.offset + draw(st.integers(0, table.size - size))
        value = draw(st.sampled_from(VALUES)) & ((1 << 8 * size) - 1)
        data[at : at + size] = value.to_bytes(size, "little")
    address = draw(st.sampled_from([ADDRESS, TEXT + (1 << 31) - 300, 1 << 61]))
    return bytes(data), table, segments, address


def make(drawn, compiled):
    data, table, segments, address = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(go_frames, "add_go_functions", add_go_functions if compiled else None)
        patch.setattr(go_frames, "_kept", {})
        try:
            return go_frames.make_tables(data, table, TEXT, segments, address, machine=62)
        except ValueError as error:
            return str(error)


@given(go_files())
def test_entries_and_errors_are_the_same(drawn):
    compiled, python = make(drawn, compiled=True), make(drawn, compiled=False)
    if isinstance(python, str):
        assert compiled == python
        return
    assert compiled.pairs == python.pairs
    assert compiled.frames == python.frames
    search = pack_pairs(compiled.packed_pairs, ADDRESS)
    if search is not None:
        packed = COUNT.pack(len(compiled.pairs)) + search + compiled.frames
        assert packed == pack_tables(python.pairs, bytes(python.frames), b"", ADDRESS)


def test_ordinary_functions_are_not_left_to_python(monkeypatch):
    monkeypatch.setattr(go_frames.FrameMaker, "add", None)
    file, table, segments = go_file([ORDINARY] * 12)
    maker = go_frames.make_tables(file, table, TEXT, segments, ADDRESS, machine=62)
    assert len(maker.pairs) == 12


@pytest.mark.parametrize(
    "pairs",
    [[(20, 30), (10, 40)], [(1, 2), ((1 << 31) + 10, 4)], [(1 << 40, 5)]],
    ids=["unsorted", "too far", "much too far"],
)
def test_pairs_that_need_sorting_or_are_too_far_are_left_to_python(pairs):
    packed = b"".join(struct.pack("<QQ", *pair) for pair in pairs)
    assert pack_pairs(packed, 0) is None


def test_the_search_table_is_relative_to_its_origin():
    packed = struct.pack("<QQQQ", 10, 5, 10, 6)
    assert pack_pairs(packed, 8) == struct.pack("<iiii", 2, -3, 2, -2)


@pytest.mark.parametrize(
    ("segments", "plain"),
    [
        ([], True),
        ([(0, 10, 100), (10, 10, 110)], True),
        ([(10, 10, 110), (0, 10, 100)], True),
        ([(0, 11, 100), (10, 10, 110)], False),
        ([(0, 100, 100), (0, 1, 101), (5, 10, 110)], False),
        ([(0, 1, at) for at in range(17)], False),
    ],
)
def test_overlapping_or_many_segments_are_left_to_python(segments, plain):
    assert Code(b"", [Segment(*row) for row in segments]).is_plain(16) is plain
