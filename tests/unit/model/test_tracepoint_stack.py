"""The leaf of a tracepoint's stack is the function with the tracepoint."""

import pytest

from otel_kprofiler.model import STACK_OK, USER_SIDE, Side, Stack, TracepointStacks
from tests.unit.model.test_wait_stack import kernel, names

PROGRAM = "bpf_prog_6b48636f7f1d7cfb_kprofiler_tracepoint"
ROOT = ["vfs_read", "do_syscall_64"]


@pytest.mark.parametrize(
    "above",
    [
        [PROGRAM, "bpf_trace_run2"],
        [PROGRAM, "bpf_trace_run2", "__bpf_trace_sys_enter"],
        [PROGRAM, "bpf_trace_run12", "__bpf_trace_sys_enter.isra.0", "__traceiter_sys_enter"],
        ["bpf_prog_6b48636f7f1d7cfb_kprofiler_trace", "bpf_trace_run1"],
    ],
)
def test_the_bpf_program_and_its_callers_are_removed_from_a_stack(above):
    stacks = TracepointStacks()
    user = Side(USER_SIDE, (), STACK_OK)
    cut = stacks.cut(Stack((kernel([*above, *ROOT]), user)))
    assert names(cut) == ROOT
    assert cut.sides[1] is user
    assert stacks.cut(cut) is cut


@pytest.mark.parametrize(
    "frames",
    [
        ROOT,
        [],
        ["bpf_trace_run2", *ROOT],
        ["bpf_prog_1_another", "bpf_trace_run2", *ROOT],
        ["bpf_prog_1_kprofiler_sample", "bpf_trace_run2", *ROOT],
    ],
)
def test_stacks_without_frames_of_the_bpf_program_are_unchanged(frames):
    stack = Stack((kernel(frames),))
    assert TracepointStacks().cut(stack) is stack


def test_a_tracepoint_stack_keeps_at_least_one_frame():
    assert names(TracepointStacks().cut(Stack((kernel([PROGRAM, "bpf_trace_run1"]),)))) == [
        "bpf_trace_run1"
    ]
