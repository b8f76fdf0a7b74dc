"""User stacks in programs and C libraries without unwind tables match the known calls."""

import platform
import shutil

import pytest

from otel_kprofiler.bpf import LibbpfLoader
from tests.truth import dumps
from tests.truth.untabled import PROGRAMS, find_missing, measure

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="code of x86-64 only is followed"),
    pytest.mark.skipif(not LibbpfLoader.is_installed(), reason="libbpf1 is not installed"),
    pytest.mark.skipif(
        any(shutil.which(need) is None for need in ("clang-14", "llvm-strip-14")),
        reason="clang-14 and llvm-14 are not installed",
    ),
]

STACKS = 400


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            each, id=f"{each.libc}: {each.name}", marks=[pytest.mark.long] * each.is_dynamic
        )
        for each in PROGRAMS
    ],
)
def test_stacks_in_stripped_programs_without_tables_are_correct(tmp_path, program):
    if missing := find_missing(program):
        pytest.skip(missing)
    result = measure(program, dumps.build(tmp_path), tmp_path, STACKS)
    assert result.is_good, (result.wrong.most_common(3), result.ends)
