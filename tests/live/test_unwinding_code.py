"""User stacks through a C library without unwind tables, checked by the calls in its code."""

import platform
import shutil
import subprocess
from collections import Counter

import pytest

from otel_kprofiler.bpf import LibbpfLoader
from otel_kprofiler.model import FrameSource, StackEnd
from tests.truth import dumps
from tests.truth.calls import Calls, take_stacks
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


@pytest.mark.parametrize("flags", [(), ("-Os", "-fno-asynchronous-unwind-tables")], ids=str)
def test_stacks_in_a_stripped_static_musl_program_are_correct(tmp_path, flags):
    named, program = tmp_path / "named", tmp_path / "plain"
    source = FOLDER / "plain.c"
    subprocess.run(["musl-gcc", "-O2", *flags, "-static", source, "-o", named], check=True)
    subprocess.run(["strip", named, "-o", program], check=True)
    stacks = take_stacks(dumps.build(tmp_path), [str(program), "all"], STACKS)
    calls = Calls(named)
    wrong = [
        text
        for stack in stacks
        if (
            text := calls.find_wrong(
                stack.addresses, stack.sources, is_complete=stack.end is StackEnd.COMPLETE
            )
        )
    ]
    assert not wrong, Counter(wrong).most_common(3)
    ends = Counter(stack.end for stack in stacks)
    assert ends[StackEnd.COMPLETE] >= COMPLETE * len(stacks), ends
    sources = {source for stack in stacks for source in stack.sources}
    assert FrameSource.DISASSEMBLY in sources
