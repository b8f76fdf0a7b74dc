"""Tracepoint program constants are packed, and tracepoints are found in BTF."""

import struct

from otel_kprofiler.bpf import KernelTypes, TracepointConstants, TracepointValue, list_tracepoints
from otel_kprofiler.bpf.tracepoints import count_recursions
from tests.bpf_object import Btf, btf

NOTHING = 255


def test_each_event_counts_as_1_if_no_value_is_configured():
    constants = TracepointConstants(3, 10, 2, True, TracepointValue())
    assert struct.unpack("=10Q", constants.pack()) == (3, 10, 2, 1, NOTHING, 0, 0, 0, 1, 0)


def test_a_tracepoint_value_is_read_from_an_argument_or_a_struct_member():
    """A member may have offset 0. Call numbers are stored plus 1, because 0 means any call."""
    for value, words in (
        (TracepointValue(1, None, True, 4096), (1, 0, 0, 1, 4096)),
        (TracepointValue(0, 0), (0, 1, 0, 0, 1)),
    ):
        packed = TracepointConstants(1, 1, 0, False, value, call=0).pack()
        assert struct.unpack("=10Q", packed) == (1, 1, 0, 0, *words, 1)


def test_tracepoint_arguments_are_listed_by_type():
    made = Btf()
    number = made.add("unsigned int", 1, 4, tail=bytes(4))
    pointer = made.add("", 2, made.add("", 10, made.struct("request", 8, [])))  # const
    made.tracepoint("block", pointer, number, made.add("size_t", 8, number))
    made.tracepoint("empty")
    data = made.pack()
    types = KernelTypes(data)
    assert types.arguments("block") == ("request", "unsigned int", "size_t")
    assert types.arguments("empty") == ()
    assert types.arguments("bloc") is None
    assert types.arguments("request") is None
    assert list_tracepoints(data) == {"block", "empty"}
    for end in range(24, len(data)):
        KernelTypes(data[:end]).arguments("block")


def test_no_tracepoints_are_listed_if_the_kernel_has_none():
    assert list_tracepoints(btf(("request", 8, []))) == set()


def test_count_recursions_returns_0_for_a_file_that_is_not_a_bpf_program():
    with open("/dev/null") as file:
        assert count_recursions(file.fileno()) == 0
    assert count_recursions(-1) == 0
