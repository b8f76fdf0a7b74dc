"""Reports and recording summaries point out incomplete user stacks."""

import pytest

from otel_kprofiler.analysis import load_samples
from otel_kprofiler.cli.completeness import Completeness
from otel_kprofiler.model import (
    KERNEL_SIDE,
    PYTHON_SIDE,
    STATUS_BY_END,
    USER_SIDE,
    Frame,
    Module,
    ModuleKind,
    Stack,
    StackEnd,
    Unresolved,
    WindowSample,
)
from tests.windows import make_window

NO_RULE = {USER_SIDE: STATUS_BY_END[StackEnd.NO_RULE]}
PENDING = {USER_SIDE: STATUS_BY_END[StackEnd.PENDING]}
MIXED = [USER_SIDE, PYTHON_SIDE, USER_SIDE, PYTHON_SIDE, USER_SIDE]
LIBC = Module("libc.so.6", ModuleKind.USER, None, None, 0, ())


def sample(sides, statuses=None, count=1, module=None):
    unresolved = None if module else Unresolved.NO_FILE
    stack = Stack.from_frames(
        (Frame(module, 1, (), 0, side, unresolved=unresolved) for side in sides), statuses
    )
    return WindowSample(
        stack, tid=1, thread_name="t", cpu=0, link=None, timestamps_unix_ns=list(range(count))
    )


def window(**samples_by_program):
    groups = (
        ({"process.executable.name": program}, samples)
        for program, samples in samples_by_program.items()
    )
    return make_window(0, 1, *groups, taken=9)


def whole_share(*samples):
    return Completeness.of_windows([window(program=list(samples))]).share


def remark(**samples_by_program):
    recorded = window(**samples_by_program)
    counts = Completeness.of_windows([recorded])
    assert Completeness.of_samples(load_samples([recorded])) == counts
    return counts.remark()


def test_a_stack_with_python_functions_counts_once():
    assert whole_share(sample(MIXED, PENDING), sample([USER_SIDE])) == pytest.approx(1 / 2)
    assert whole_share(sample(MIXED), sample([USER_SIDE], PENDING)) == pytest.approx(1 / 2)


def test_completeness_is_weighted_by_each_stacks_number_of_samples():
    assert whole_share(sample(MIXED, count=3), sample(MIXED, PENDING)) == pytest.approx(3 / 4)


def test_a_truncated_stack_without_native_frames_counts_as_incomplete():
    assert whole_share(sample([PYTHON_SIDE], PENDING), sample(MIXED)) == pytest.approx(1 / 2)


def test_samples_without_a_user_stack_are_excluded():
    assert whole_share(sample([KERNEL_SIDE])) is None
    assert whole_share(sample([KERNEL_SIDE]), sample([USER_SIDE])) == 1


def test_the_remark_names_the_program_that_has_the_most_incomplete_user_stacks():
    node = [sample([USER_SIDE], NO_RULE, count=8), sample([USER_SIDE], NO_RULE, 1, LIBC)]
    sh = [sample([USER_SIDE], PENDING, 3, LIBC), sample([USER_SIDE], count=20)]
    assert remark(node=node, sh=sh) == (
        "12 incomplete user stacks, 9 of them in node, in code without a file: "
        "the code has neither an unwind table nor a frame pointer"
    )
    assert remark(sh=sh) == (
        "3 incomplete user stacks, all in sh, in libc.so.6: "
        "the unwind table of the caller's file was not loaded yet"
    )


def test_a_remark_about_a_single_incomplete_stack_names_the_program():
    assert remark(sh=[sample([USER_SIDE], PENDING, 1, LIBC)]) == (
        "1 incomplete user stack in sh, in libc.so.6: "
        "the unwind table of the caller's file was not loaded yet"
    )


def test_the_remark_on_incomplete_stacks_contains_a_program_count_if_no_program_dominates():
    programs = {
        f"cc{number}": [sample([USER_SIDE], PENDING, 2, LIBC), sample([USER_SIDE])]
        for number in range(4)
    }
    assert remark(**programs, sh=[sample([USER_SIDE], NO_RULE)]) == (
        "9 incomplete user stacks, 8 of them in 4 programs such as cc0: "
        "the unwind table of the caller's file was not loaded yet"
    )


def test_a_few_incomplete_stacks_are_not_mentioned():
    assert remark(sh=[sample([USER_SIDE], PENDING), sample([USER_SIDE], count=99)]) == ""
    assert remark(sh=[sample([USER_SIDE], PENDING), sample([USER_SIDE], count=98)]) != ""
    assert remark(sh=[sample([KERNEL_SIDE])]) == ""
