"""User frames have the right names while files appear, change and disappear."""

import re
import shutil
import subprocess
import time

import pytest
from unwind_maps import compile_c

from otel_kprofiler.model import Unresolved
from tests.further import further, further_of
from tests.needs import LIBBPF
from tests.truth.naming import WORKLOADS, build, run, running, sample_host

pytestmark = [pytest.mark.live, LIBBPF]


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    directory = tmp_path_factory.mktemp("variants")
    build(directory)
    return directory


@pytest.mark.parametrize("workload", further_of(WORKLOADS, ("reused pid",)))
def test_frames_are_not_named_after_earlier_or_later_code_at_the_same_address(variants, workload):
    frames = named = 0
    until = time.monotonic() + 60
    while frames <= 100 or not (named or workload == "overwritten library"):
        result = run(workload, variants, 1.5)
        assert result.wrong == []
        frames, named = frames + result.frames, named + result.named
        assert time.monotonic() < until, result


WORKS = """
    volatile long count;
    __attribute__((noinline)) %s void hot(void)
    {
        for (int i = 0; i < 1000; i++)
            count++;
    }
    __attribute__((noinline)) void outer(void) { hot(); count++; }
    int main(void) { for (;;) outer(); }
"""


def leaves(windows, module):
    frames = [sample.stack.frames[0] for window in windows for _, sample in window.samples]
    return [frame for frame in frames if frame.module and frame.module.name.startswith(module)]


@pytest.mark.long
def test_a_deleted_program_is_resolved_with_its_own_symbols(tmp_path):
    program = compile_c(tmp_path / "works", WORKS % "static", "-O1")
    with running(program):
        program.unlink()
        windows = sample_host(1.0)
    result = leaves(windows, "works")
    assert result
    assert {frame.function for frame in result} <= {"hot", "outer", "main"}


@pytest.mark.long
def test_functions_in_a_stripped_program_have_bounds_but_no_names(tmp_path):
    program = compile_c(tmp_path / "works", WORKS % "static", "-O1", "-s")
    with running(program):
        result = leaves(sample_host(1.0), "works")
    assert result
    assert {frame.unresolved for frame in result} == {Unresolved.NO_NAME}
    dumped = subprocess.run(
        ["objdump", "--dwarf=frames", program], capture_output=True, text=True, check=True
    ).stdout
    starts = {int(start, 16) for start in re.findall(r"pc=([0-9a-f]+)\.\.", dumped)}
    assert {frame.address - frame.offset for frame in result} <= starts


@pytest.mark.long
def test_frames_are_named_from_an_installed_debug_file(tmp_path):
    program = compile_c(tmp_path / "works", WORKS % "static", "-O1", "-g")
    debug = tmp_path / ".debug" / "works.debug"
    debug.parent.mkdir()
    subprocess.run(["objcopy", "--only-keep-debug", program, debug], check=True)
    subprocess.run(["strip", program], check=True)
    subprocess.run(["objcopy", f"--add-gnu-debuglink={debug}", program], check=True)
    with running(program):
        result = leaves(sample_host(1.0), "works")
    assert {frame.function for frame in result} <= {"hot", "outer", "main"}
    assert result


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
@pytest.mark.parametrize("option", ["--perf-basic-prof", *further("--perf-prof")])
def test_jit_compiled_functions_are_named_as_published(option, tmp_path):
    script = (
        "function hot(n){let s=0;for(let i=0;i<n;i++)s+=i%7;return s}"
        "for(let i=0;;i++){hot(1e6);new Function(`return ${i}`)()}"
    )
    with running("env", "-C", tmp_path, "node", "--always-sparkplug", option, "-e", script):
        windows = sample_host(4.0)
    frames = [
        frame
        for window in windows
        for _, sample in window.samples
        if sample.thread_name == "node"
        for frame in sample.stack.frames[:1]
        if frame.module is None
    ]
    named = [frame.function for frame in frames if frame.lines]
    assert any(name.startswith("JS:*hot ") for name in named), {
        frame.unresolved for frame in frames
    }
    assert len(named) > len(frames) / 2
    has_lines = any(frame.lines[0].line for frame in frames if frame.function.startswith("JS:*hot"))
    assert has_lines == (option == "--perf-prof")
