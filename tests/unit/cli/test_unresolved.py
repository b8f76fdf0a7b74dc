"""The summary of a recording points out frames without names."""

import pytest

from otel_kprofiler.cli.unresolved import UnresolvedFrames
from otel_kprofiler.model import (
    KERNEL_SIDE,
    USER_SIDE,
    Frame,
    Line,
    Module,
    ModuleKind,
    Stack,
    Unresolved,
    WindowSample,
)
from tests.windows import make_window

PYTHON = Module("python3.11", ModuleKind.USER, None, None, 0, ())
LIBC = Module("libc.so.6", ModuleKind.USER, None, None, 0, ())
NAMED = Frame(LIBC, 1, (Line("read"),), 0, USER_SIDE)
KERNEL = Frame(None, 1, (Line("vfs_read"),), 0, KERNEL_SIDE)


def nameless(module, reason=Unresolved.NO_NAME, side=USER_SIDE):
    return Frame(module, 1, (), 0, side, reason)


def count(*stacks):
    samples = [
        WindowSample(Stack.from_frames(frames), 1, "t", 0, None, list(range(number)))
        for number, frames in stacks
    ]
    return UnresolvedFrames.of_windows([make_window(0, 1, ({}, samples), taken=9)])


def test_the_percentage_of_unnamed_frames_includes_all_samples():
    counts = count((3, [KERNEL, NAMED, nameless(PYTHON)]), (1, [NAMED, NAMED]))
    assert str(counts) == "0.0% of kernel and 37.5% of user frames"
    assert str(count()) == "0.0% of kernel frames"


def test_the_remark_names_the_file_with_the_most_unresolved_frames():
    counts = count((3, [nameless(PYTHON), NAMED]), (1, [nameless(LIBC, Unresolved.NO_SYMBOL)]))
    assert counts.remark() == (
        "75% of unresolved user frames are in python3.11: the file has no name for the function; "
        "install its debug symbols (docs/faq.md)"
    )


def test_a_perf_map_is_suggested_for_unresolved_code_that_is_not_in_a_file():
    assert count((1, [nameless(None, Unresolved.NO_FILE)])).remark() == (
        "100% of unresolved user frames: the code is in memory without a file, such as "
        "JIT-compiled code; let the compiler write a perf map (docs/symbols.md)"
    )


@pytest.mark.parametrize(
    "stacks",
    [
        [(1, [NAMED])],
        [(9, [NAMED] * 10), (9, [nameless(PYTHON)])],
        [(1, [nameless(PYTHON, Unresolved.USER_ADDRESS)])],
        [(1, [nameless(None, Unresolved.HIDDEN, KERNEL_SIDE)])],
    ],
    ids=["names", "few", "no fix", "kernel"],
)
def test_no_remark_is_printed_if_few_frames_are_unnamed_or_no_fix_is_known(stacks):
    assert count(*stacks).remark() == ""
