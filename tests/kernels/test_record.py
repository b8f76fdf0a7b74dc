"""Tests ``record`` and ``doctor`` on this kernel, using programs with known call chains."""

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from otel_kprofiler.formats import stack_entries
from otel_kprofiler.model import KERNEL_SIDE, USER_SIDE
from otel_kprofiler.otlp import read_profiles
from tests.commands import run_checked, run_command

pytestmark = [pytest.mark.kernel, pytest.mark.built_programs]

PROGRAMS = Path(os.environ.get("MATRIX_PROGRAMS", "/nonexistent"))
CALLERS = {
    "serve": {"main"},
    "variable_frame": {"serve"},
    "large_frame": {"variable_frame"},
    "leaf": {"large_frame"},
    "sorts": {"serve"},
    "reads_clock": {"serve"},
    "asks": {"serve"},
    "waits": {"serve"},
    "in_handler": {"handle"},
}
"""The callers of the functions in chains.c, except those called by libc or the kernel."""
GO_CALLERS = {
    "main.fib": {"main.fib", "main.work"},
    "main.deep": {"main.deep", "main.channels.func1"},
    "main.tree": {"main.tree", "main.work"},
    "main.closes": {"main.work"},
    "main.work": {"main.main", "main.main.func1"},
}
GO_FUNCTIONS = {"main.fib", "main.deep", "main.work"}
ENOUGH = 50
TRUNCATED = "[truncated]"
SYSCALLS = {"x86_64": "x64", "aarch64": "arm64"}[os.uname().machine]
GO_ROOTS = {"runtime.main", "main.main.func1", "main.channels.func1"}


class Seen(NamedTuple):
    """A recorded stack: the names of its user and kernel frames, outermost first."""

    kind: str
    user: tuple[str, ...]
    kernel: tuple[str, ...]
    is_pending: bool  # a file's unwind table had not been read, which may take seconds


def record(directory, program, is_enough):
    """Records a program on-CPU and off-CPU, and returns its stacks with their sample counts.

    Repeats with longer recordings until there are enough stacks, since loading tables may take
    minutes on emulated CPUs.
    """
    for seconds in (15, 60, 240):
        result = record_for(seconds, directory, program)
        if is_enough(result):
            break
    return result


def record_for(seconds, directory, program):
    file = directory / f"{seconds}.otlp"
    options = ["-d", f"{seconds}s", "-F", "199", "--off-cpu", "-o", file]
    done = run_checked("record", *options, "--", program, timeout=None)
    print(done.stderr)  # noqa: T201 - shown if the test fails
    result = Counter()
    for profile in itertools.chain.from_iterable(w.profiles for w in read_profiles(str(file))):
        for sample in itertools.chain.from_iterable(group.samples for group in profile.resources):
            if sample.thread_name == program.name[:15]:
                result[see(profile.kind.name, sample.stack)] += len(sample.timestamps_unix_ns)
    return result


def see(kind, stack):
    entries = stack_entries(stack)
    names = {
        side: tuple(entry.name for entry in entries if entry.side is side)
        for side in (USER_SIDE, KERNEL_SIDE)
    }
    is_pending = any("was not loaded yet" in entry.reason for entry in entries)
    return Seen(kind, names[USER_SIDE], names[KERNEL_SIDE], is_pending)


def find_wrong(stacks, callers):
    """Returns the recorded (caller, function) pairs that are impossible in the program."""
    return {
        (caller, frame)
        for seen in stacks
        for caller, frame in itertools.pairwise(seen.user)
        if caller not in (*callers.get(frame, (caller,)), TRUNCATED)
    }


def count_on_cpu(stacks, condition):
    """Counts on-CPU samples with loaded tables by whether the user stack satisfies a condition."""
    counts = Counter()
    for seen, number in stacks.items():
        if seen.kind == "on_cpu" and seen.user and not seen.is_pending:
            counts[bool(condition(seen.user))] += number
    return counts


def share(stacks, condition):
    counts = count_on_cpu(stacks, condition)
    assert counts.total() >= ENOUGH, counts
    return counts[True] / counts.total()


def find_functions(stacks):
    return {frame for seen in stacks for frame in seen.user}


def test_doctor_reports_no_problems_when_run_as_root():
    """As root, `doctor` finds everything that profiling needs."""
    done = run_command("doctor", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "variant", sorted(path.name for path in PROGRAMS.glob("chains*")) or ["chains"]
)
def test_recorded_stacks_contain_no_wrong_caller(tmp_path, variant):
    """`record` shows correct, full stacks in signals, system calls, waits and leaf functions."""
    functions = {*CALLERS, "handle", "compare"}

    def is_enough(stacks):
        return count_on_cpu(stacks, bool).total() >= ENOUGH and find_functions(stacks) >= functions

    stacks = record(tmp_path, PROGRAMS / variant, is_enough)
    assert not find_wrong(stacks, CALLERS)
    assert share(stacks, lambda user: user[0] == "_start") >= 0.97, stacks
    assert find_functions(stacks) >= functions
    kernel = Counter()
    for seen, count in stacks.items():
        kernel.update({(seen.kind, seen.user[-1:], name): count for name in seen.kernel})
    assert kernel["on_cpu", ("syscall",), f"__{SYSCALLS}_sys_getppid"]
    assert kernel["off_cpu", ("clock_nanosleep",), f"__{SYSCALLS}_sys_clock_nanosleep"]


@pytest.mark.skipif(not (PROGRAMS / "go").exists(), reason="needs go on the host")
def test_recorded_go_stacks_contain_no_incorrect_callers(tmp_path):
    """Stacks from a static Go program, unwound with its tables, extend to the goroutine's start."""

    def find_of_work(stacks):
        return {seen: number for seen, number in stacks.items() if "main.work" in seen.user}

    def is_enough(stacks):
        enough = count_on_cpu(find_of_work(stacks), bool).total() >= ENOUGH
        return enough and find_functions(stacks) >= GO_FUNCTIONS

    stacks = record(tmp_path, PROGRAMS / "go", is_enough)
    assert not find_wrong(stacks, GO_CALLERS)
    of_work = find_of_work(stacks)
    assert share(of_work, lambda user: user[0] in GO_ROOTS) >= 0.95, of_work
    assert find_functions(stacks) >= GO_FUNCTIONS
