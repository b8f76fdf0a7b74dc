"""User stacks through programs and C libraries without unwind tables, checked by their calls."""

import platform
import shutil
import subprocess
from collections import Counter

import pytest

from otel_kprofiler.bpf import LibbpfLoader
from otel_kprofiler.model import FrameSource, StackEnd
from tests.truth import dumps
from tests.truth.calls import Calls, find_libraries, find_wrong, take_stacks
from tests.truth.programs import FOLDER

NEEDS = ("clang-14", "llvm-strip-14", "musl-gcc", "objdump", "nm", "strip")
pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="code of x86-64 only is followed"),
    pytest.mark.skipif(not LibbpfLoader.is_installed(), reason="libbpf1 is not installed"),
    pytest.mark.skipif(
        any(shutil.which(need) is None for need in NEEDS), reason="no clang, musl-gcc or binutils"
    ),
]

STACKS = 400
COMPLETE = 0.98


def check(stacks, calls):
    """Assert that nearly all stacks are complete, with frames that were found in the code."""
    assert not (wrong := find_wrong(stacks, calls)), wrong.most_common(3)
    ends = Counter(stack.end for stack in stacks)
    assert ends[StackEnd.COMPLETE] >= COMPLETE * len(stacks), ends
    assert FrameSource.DISASSEMBLY in {source for stack in stacks for source in stack.sources}


def build(folder, command, *flags):
    """Build a program at a fixed address, named and stripped; returns both."""
    named, program = folder / "named", folder / "stripped"
    subprocess.run([*command, *flags, "-o", named], check=True)
    subprocess.run(["strip", named, "-o", program], check=True)
    return named, program


@pytest.mark.parametrize("flags", [(), ("-Os", "-fno-asynchronous-unwind-tables")], ids=str)
def test_stacks_in_a_stripped_static_musl_program_are_correct(tmp_path, flags):
    command = ["musl-gcc", "-O2", FOLDER / "plain.c", "-static"]
    named, program = build(tmp_path, command, *flags)
    check(take_stacks(dumps.build(tmp_path), [str(program), "all"], STACKS), Calls(named))


@pytest.mark.long
def test_stacks_in_a_stripped_dynamic_musl_program_are_correct(tmp_path):
    named, program = build(tmp_path, ["musl-gcc", "-O2", FOLDER / "plain.c", "-no-pie"])
    command = ["setarch", "-R", str(program), "all"]
    stacks = take_stacks(dumps.build(tmp_path), command, STACKS)
    check(stacks, Calls(named, find_libraries(command)))


GLIBC = ("gcc", "-O2", "-fomit-frame-pointer", "-fno-asynchronous-unwind-tables")
RUST = ("-Cforce-unwind-tables=no", "-Ctarget-feature=+crt-static", "-Crelocation-model=static")


def test_stacks_in_a_stripped_program_without_tables_are_correct(tmp_path):
    named, program = build(tmp_path, [*GLIBC, FOLDER / "plain.c", "-static"])
    check(take_stacks(dumps.build(tmp_path), [str(program), "all"], STACKS), Calls(named))


@pytest.mark.skipif(shutil.which("rustc") is None, reason="no rustc")
def test_stacks_in_a_stripped_rust_program_without_tables_are_correct(tmp_path):
    named, program = build(tmp_path, ["rustc", "-O", "-Cpanic=abort", FOLDER / "work.rs"], *RUST)
    check(take_stacks(dumps.build(tmp_path), [str(program)], STACKS), Calls(named))
