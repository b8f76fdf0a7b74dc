"""Stacks are rebuilt from function rows, including inlined and recursive calls."""

from otel_kprofiler.clickhouse.stacks import Stacks
from otel_kprofiler.model import (
    KERNEL_SIDE,
    PYTHON_SIDE,
    STACK_TRUNCATED,
    USER_SIDE,
    ModuleKind,
    Unresolved,
)

VSYSCALL = 0xFFFFFFFFFF600000


def stack(*rows, statuses=()):
    """Builds a stack from rows of address, function, file, line and mapping."""
    stacks = Stacks()
    stacks.add(1, list(zip(*rows, strict=True)) or [[]] * 5)
    return stacks.get(1, statuses)


def test_everything_called_by_vmlinux_is_in_the_kernel_stack():
    result = stack(
        (0x50, "nf_hook", "", 0, "nf_conntrack"),
        (0x60, "count", "", 0, "bpf_prog_0123456789abcdef_count"),
        (0x10, "do_syscall_64", "", 0, "vmlinux"),
        (0x70, "read", "", 0, "libc.so.6"),
    )
    kernel, user = result.sides
    assert (kernel.kind, user.kind) == (KERNEL_SIDE, USER_SIDE)
    kinds = [frame.module.kind for frame in result.frames]
    assert kinds == [ModuleKind.LOADED, ModuleKind.BPF, ModuleKind.VMLINUX, ModuleKind.USER]


def test_unmapped_kernel_addresses_are_in_the_kernel_stack():
    (side,) = stack((1 << 63, "", "", 0, "")).sides
    assert side.kind is KERNEL_SIDE
    assert side.frames[0].unresolved is Unresolved.NOT_KEPT
    (side,) = stack((VSYSCALL, "", "", 0, "[vsyscall]")).sides
    assert side.kind is USER_SIDE


def test_frames_in_interpreted_languages_are_recognized_by_their_files():
    rows = [
        (0, "handle", "/srv/app.py", 3, ""),
        (0, "get", "<frozen importlib>", 3, ""),
        (0, "run", "Main.java", 5, ""),
        (0, "unknown", "", 0, ""),
        (0x10, "main", "main.py", 1, "program"),
    ]
    assert [frame.side.name for frame in stack(*rows).frames] == [
        "python", "python", "jvm", "user", "user",
    ]  # fmt: skip
    assert stack(rows[0]).frames[0].side is PYTHON_SIDE


def test_functions_at_the_same_address_are_treated_as_inlined_unless_a_function_repeats():
    walk = (0x20, "walk", "tree.c", 9, "program")
    visit = (0x20, "visit", "tree.h", 2, "program")
    result = stack(visit, walk, visit, walk, walk, (0x30, "main", "main.c", 1, "program"))
    lines = [[line.function for line in frame.lines] for frame in result.frames]
    assert lines == [["visit", "walk"], ["visit", "walk"], ["walk"], ["main"]]
    python = (0, "walk", "app.py", 1, "")
    assert len(stack(python, (0, "visit", "app.py", 1, ""), python).frames) == 3


def test_frames_without_a_name_are_not_treated_as_inlined():
    result = stack((0x20, "", "", 0, "program"), (0x20, "", "", 0, "program"))
    assert len(result.frames) == 2
    assert not any(frame.lines for frame in result.frames)


def test_placeholder_names_are_decoded_as_reasons_for_missing_names():
    result = stack(
        (0x20, "program+0x20 [no_name]", "", 0, "program"),
        (0x20, "program+0x20 [no_name]", "", 0, "program"),
        (0x30, "other [no_name]", "", 0, "program"),
        (0x40, "[unmapped]", "", 0, ""),
    )
    assert [frame.unresolved for frame in result.frames] == [
        Unresolved.NO_NAME, Unresolved.NO_NAME, None, Unresolved.UNMAPPED,
    ]  # fmt: skip


def test_equal_stacks_are_merged_and_keep_their_statuses():
    stacks = Stacks()
    row = [[0x10], ["do_syscall_64"], [""], [0], ["vmlinux"]]
    stacks.add(1, row)
    stacks.add(2, row)
    statuses = ((KERNEL_SIDE, STACK_TRUNCATED),)
    assert stacks.get(1, ()) is stacks.get(1, ())
    assert stacks.get(1, ()).frames[0] is stacks.get(2, ()).frames[0]
    assert stacks.get(1, statuses).sides[0].status == STACK_TRUNCATED
    assert stack(statuses=statuses).sides[0].status == STACK_TRUNCATED
