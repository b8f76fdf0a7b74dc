"""Struct member offsets are read from BTF. ``test_unwind_config.py`` tests nested members."""

import pytest

from otel_kprofiler.bpf import KernelTypes
from otel_kprofiler.bpf.btf import parse_program_btf
from tests.bpf_object import btf

TASK = ("task_struct", 4096, [("state", 0, 1), ("leader", 80, 1), ("start", 160, 1)])


def test_offsets_are_in_bytes():
    """A different struct has a member of the same name."""
    types = KernelTypes(btf(("other", 8, [("task_struct", 0, 1), ("leader", 8, 1)]), TASK))
    assert [types.offset("task_struct", name) for name in ("leader", "start")] == [80, 160]
    assert types.size("task_struct") == 4096


def test_the_offset_of_a_missing_struct_member_is_none():
    types = KernelTypes(btf(TASK))
    assert types.offset("task_struct", "group") is None
    assert types.offset("task_struct_x", "leader") is None
    assert types.size("task") is None


@pytest.mark.parametrize("data", [b"", b"\x9f\xeb", bytes(64)], ids=["empty", "short", "no magic"])
def test_unrecognized_data_is_rejected(data):
    with pytest.raises(ValueError, match="no BTF header"):
        KernelTypes(data)
    assert parse_program_btf(data).functions == {}


def test_members_beyond_the_end_of_truncated_btf_have_no_offset():
    whole = btf(TASK)
    for size in range(24, len(whole)):
        assert KernelTypes(whole[:size]).offset("task_struct", "start") in (None, 160)
