"""The Python stack of a sample survives a round trip, and malformed bytes are rejected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.model import (
    MAX_CODE_ID,
    NO_INSTRUCTION,
    STACK_OK,
    STACK_TRUNCATED,
    STATUS_BY_PYTHON_END,
    PythonEnd,
    PythonFrame,
    pack_python_stack,
    parse_python_stack,
    python_stack_bytes,
    split_python_stack,
)

FRAMES = st.lists(
    st.builds(
        PythonFrame, st.integers(0, MAX_CODE_ID), st.integers(0, NO_INSTRUCTION), st.booleans()
    ),
    max_size=127,
)
ENDS = st.sampled_from(PythonEnd)
TAGS = st.integers(0, 2**32 - 1)


@given(ENDS, FRAMES, TAGS)
def test_packing_and_parsing_preserve_a_python_stack(end, frames, tag):
    raw = pack_python_stack(end, frames, tag)
    assert parse_python_stack(raw) == (end, tag, tuple(frames))
    assert python_stack_bytes(b"junk" + raw + b"more", 4) == len(raw)


@given(ENDS, FRAMES, st.binary(min_size=1, max_size=20), st.integers(1, 7))
def test_stacks_with_missing_or_extra_bytes_are_rejected(end, frames, more, less):
    raw = pack_python_stack(end, frames)
    for malformed in (raw + more, raw[:-less]):
        with pytest.raises(ValueError, match="malformed"):
            split_python_stack(malformed)


@given(st.binary(max_size=100))
def test_arbitrary_bytes_parse_as_a_python_stack_or_are_rejected(raw):
    try:
        end, _, words = split_python_stack(raw)
    except ValueError:
        return
    assert isinstance(end, PythonEnd)
    assert not raw or len(raw) == 8 + 8 * len(words)


def test_packed_python_stacks_have_the_layout_that_the_bpf_program_writes():
    raw = pack_python_stack(1, [(0x123456789A, 0x2ABCDE, True)], 0xAABBCCDD)
    assert raw[:4] == b"\x01\x01\x01\x00"
    assert raw[4:8] == bytes.fromhex("ddccbbaa")
    assert int.from_bytes(raw[8:], "little") == 1 << 62 | 0x2ABCDE << 40 | 0x123456789A


def test_an_empty_buffer_parses_as_a_stack_without_frames():
    assert parse_python_stack(b"") == (PythonEnd.COMPLETE, 0, ())


def test_each_reason_for_an_incomplete_stack_has_a_distinct_status():
    assert STATUS_BY_PYTHON_END[: len(PythonEnd)][:2] == (STACK_OK, STACK_TRUNCATED)
    assert len(set(STATUS_BY_PYTHON_END)) == len(PythonEnd) + 1
    assert STATUS_BY_PYTHON_END[-1] < 0
