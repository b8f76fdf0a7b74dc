"""User stacks unwound with unwind tables, compared frame by frame with an independent unwinder."""

import os
import shutil
import subprocess
from bisect import bisect_right
from collections import Counter
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

import pytest
from samplers import drain_until, sampling, spawned

from otel_kprofiler.bpf import DEFAULT_MAX_WORK, PAGE_BYTES
from otel_kprofiler.model import USER_SIDE, FrameSource, StackEnd, parse_user_stack
from otel_kprofiler.unwinding import Limits
from tests.further import further, further_of
from tests.needs import CLANG, LIBBPF, X86_64
from tests.raw_forks import check_in_child
from tests.truth import compare, costly, dumps
from tests.truth.compare import Verdict
from tests.truth.reference import Maps
from tests.waiting import wait_until

pytestmark = [pytest.mark.live, X86_64, LIBBPF]

PROGRAMS = Path(__file__).parents[1] / "truth" / "programs"
HZ = 997
BUILDS = {
    "pie": ("-O2", "-fomit-frame-pointer"),
    "fixed address": ("-O2", "-no-pie", "-fomit-frame-pointer"),
    "static": ("-O3", "-static", "-fomit-frame-pointer"),
    "frame pointers": ("-O0",),
}
STACKS = 250
LONGEST_STEP = 400
"""A step (mapping, search, interpreter) may exceed the work limit by up to this many units."""


needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return dumps.build(tmp_path_factory.mktemp("dump"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("walk"), {}

    def compile_walk(*flags):
        if flags not in known:
            target = str(folder / f"walk{len(known)}")
            sources = map(str, (PROGRAMS / "walk.cpp", PROGRAMS / "rules.S"))
            subprocess.run(["g++", *flags, *sources, "-o", target, "-lpthread"], check=True)
            known[flags] = target
        return known[flags]

    return compile_walk


@contextmanager
def running(*command):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with spawned(*command, **quiet, start_new_session=True) as process:
        yield process.pid


def take_loaded(dumper, pid, count=STACKS):
    """Takes stacks until all unwind tables are loaded, and returns the last ``count`` stacks."""

    def take():
        result = dumper.take(pid, HZ, count)
        assert result, "no samples"
        return all(dump.stack.end is not StackEnd.PENDING for dump in result) and result

    return wait_until(take, say=dumper.tables.counts)


def assert_true(report, complete=0.98):
    assert not report.wrong, f"{len(report.wrong)} wrong:\n" + "\n\n".join(report.wrong[:3])
    assert report.ends[StackEnd.COMPLETE] >= complete * report.total, report.ends
    assert report.verdicts[Verdict.EQUAL] >= 0.9 * report.total, report.verdicts


@CLANG
@needs_gcc
@pytest.mark.parametrize(
    ("build", "registers"), further_of([*product(BUILDS, ("pt_regs", "5.10"))], [("pie", "5.10")])
)
def test_stacks_in_compiled_code_are_correct(built, compiled, build, registers):
    """User registers are read by a BPF helper or, as on 5.10, from the top of the kernel stack."""
    with (
        running(compiled(*BUILDS[build]), "signals", "threads") as pid,
        dumps.Dumps(built, top_of_stack=registers == "5.10") as dumper,
    ):
        loaded = take_loaded(dumper, pid)
        report = compare.compare(loaded, Maps(pid))
    assert_true(report)
    assert any(FrameSource.SIGNAL in dump.stack.sources for dump in loaded)


@needs_gcc
@pytest.mark.parametrize("unwinding", ["auto", "frame_pointers"])
def test_threads_that_the_kernel_runs_for_a_process_have_no_user_frames(tmp_path, unwinding):
    program = tmp_path / "io_uring"
    subprocess.run(["gcc", "-O2", PROGRAMS / "io_uring.c", "-o", program], check=True)
    with suppress(subprocess.TimeoutExpired):
        subprocess.run([program], timeout=0.5)
        pytest.skip("the kernel does not allow io_uring")
    settings = {"samples_per_second": HZ, "stacks": "both", "user_unwinding": unwinding}
    with running(program) as pid, sampling(**settings, target_pids=(pid,)) as sampler:

        def of_workers(samples):
            return [sample for sample in samples if sample.comm.startswith(b"iou-wrk")]

        samples = of_workers(drain_until(sampler, lambda taken: len(of_workers(taken)) > 50))
    for sample in samples:
        sides = dict(zip([kind for kind, _ in sample.collected], sample.stacks, strict=True))
        assert not sides.get(USER_SIDE), sides


@CLANG
@needs_gcc
def test_every_kind_of_unwind_rule_is_applied(built, compiled):
    with running(compiled("-O2", "-no-pie"), "rules") as pid, dumps.Dumps(built) as dumper:
        report = compare.compare(take_loaded(dumper, pid), Maps(pid))
    assert_true(report)


INTERPRETED = "def f(n):\n return sum(map(f, [n - 1])) + n if n else 0\nwhile True: f(9)"
SHELL = 'f() { [ "$1" -gt 0 ] && f $(($1 - 1)); }; while :; do f 7; done'


@CLANG
@pytest.mark.parametrize(
    "command",
    [("/bin/bash", "-c", SHELL), *further((("/usr/bin/python3", "-c", INTERPRETED),))],
    ids=["bash", "python"],
)
def test_stacks_of_distribution_programs_are_correct(built, command):
    with running(*command) as pid, dumps.Dumps(built) as dumper:
        report = compare.compare(take_loaded(dumper, pid), Maps(pid))
    assert_true(report)


@CLANG
@needs_gcc
def test_a_stack_ends_at_a_file_whose_unwind_table_is_not_loaded(built, compiled):
    program = compiled("-O2", "-fomit-frame-pointer")
    with running(program) as pid, dumps.Dumps(built, answering=False) as dumper:
        result = dumper.take(pid, HZ, 50)
    assert {(dump.stack.end, len(dump.stack.addresses)) for dump in result} == {
        (StackEnd.PENDING, 1)
    }


@CLANG
@needs_gcc
def test_unwinding_stops_at_the_work_limit(built, compiled):
    with (
        running(compiled("-O2", "-fomit-frame-pointer")) as pid,
        dumps.Dumps(built, max_work=100) as dumper,
    ):
        loaded = take_loaded(dumper, pid, 200)
        report = compare.compare(loaded, Maps(pid))
    assert not report.wrong
    assert report.ends[StackEnd.WORK_LIMIT] > 20
    assert max(dump.work for dump in loaded) < 100 + LONGEST_STEP


@pytest.mark.long
@CLANG
@needs_gcc
@pytest.mark.parametrize("kind", costly.KINDS)
def test_the_most_expensive_stacks_are_truncated_at_the_work_limit(built, tmp_path, kind):
    with (
        running(*costly.build(tmp_path, kind, files=6, entries=2000)) as pid,
        dumps.Dumps(built, max_work=DEFAULT_MAX_WORK, forgetting=True) as dumper,
    ):
        loaded = take_loaded(dumper, pid, 60)
        report = compare.compare(loaded, Maps(pid))
    assert not report.wrong, report.wrong[0]
    # Between two call chains, stacks are complete or pending, because they may contain other files.
    assert set(report.ends) <= {StackEnd.WORK_LIMIT, StackEnd.COMPLETE, StackEnd.PENDING}
    assert report.ends[StackEnd.WORK_LIMIT] > 30
    assert max(dump.work for dump in loaded) < DEFAULT_MAX_WORK + LONGEST_STEP


@CLANG
@needs_gcc
def test_evicting_unwind_tables_never_results_in_a_wrong_frame(built, compiled):
    # enough for the tables of Python or libstdc++, but not both
    limits = Limits(3 << 20, 1 << 20, 0)
    with (
        running(compiled("-O2", "-fomit-frame-pointer"), "signals") as walk,
        running("/usr/bin/python3", "-c", INTERPRETED) as python,
        dumps.Dumps(built, limits=limits) as dumper,
    ):
        ends = Counter()
        for _ in range(6):
            for pid in (walk, python):
                report = compare.compare(dumper.take(pid, HZ, 60), Maps(pid))
                assert not report.wrong, report.wrong[0]
                ends += report.ends
    assert ends[StackEnd.COMPLETE]


@pytest.mark.long
@CLANG
@needs_gcc
def test_evicting_and_reloading_unwind_tables_never_results_in_a_wrong_frame(built, tmp_path):
    """Frame sizes differ at the same address, so a table in the wrong slot would be detected."""
    command = costly.build(
        tmp_path, "short entries", files=25, entries=640, frame_bytes=136, alike=False
    )
    image_bytes = 6 * PAGE_BYTES
    limits = Limits(6 * image_bytes, image_bytes, 0)
    with running(*command) as pid, dumps.Dumps(built, limits=limits) as dumper:
        result = dumper.take(pid, HZ, 1500)
        report = compare.compare(result, Maps(pid))
    assert not report.wrong, f"{len(report.wrong)} wrong:\n" + report.wrong[0]
    assert sum(FrameSource.TABLE in dump.stack.sources for dump in result) > 100, report.ends
    wait_until(lambda: not dumper.tables.counts().pending)
    counts = dumper.tables.counts()
    assert counts.requested == counts.loaded + sum(counts.refused.values()), counts
    assert counts.evicted > 20, counts
    assert counts.tables == counts.loaded - counts.evicted, counts
    assert counts.bytes <= limits.total_bytes, counts


@CLANG
@needs_gcc
def test_a_new_unwind_table_is_loaded_for_a_program_overwritten_in_place(built, compiled, tmp_path):
    path = tmp_path / "program"
    shutil.copy(compiled("-O2", "-fomit-frame-pointer"), path)
    with dumps.Dumps(built) as dumper:
        with running(str(path)) as pid:
            assert_true(compare.compare(take_loaded(dumper, pid, 50), Maps(pid)))
        status = path.stat()
        path.write_bytes(Path(compiled("-O0")).read_bytes())
        assert path.stat().st_ino == status.st_ino
        Maps.forget()
        with running(str(path)) as pid:
            assert_true(compare.compare(take_loaded(dumper, pid, 50), Maps(pid)))


@needs_gcc
def test_the_sampler_delivers_complete_user_stacks_with_their_files(compiled):
    program = compiled("-O2", "-fomit-frame-pointer")
    with (
        running(program, "signals") as pid,
        sampling(samples_per_second=499, stacks="both", target_pids=(pid,)) as sampler,
    ):
        result = drain_until(sampler, lambda result: len(result) >= 250)
        while sampler.tables.pending:
            result += drain_until(sampler, bool)
        loaded = len(result)
        result += drain_until(sampler, lambda late: len(late) >= 250)
        counts, tables = sampler.counts()["on_cpu"], sampler.tables
    stacks = [parse_user_stack(sample.words(USER_SIDE)) for sample in result]
    late = stacks[loaded:]
    ends = Counter(stack.end for stack in late)
    assert ends[StackEnd.COMPLETE] >= 0.98 * len(late), ends
    assert counts.truncated == Counter(stack.end.name.lower() for stack in stacks if stack.end)
    status = os.stat(program)
    keys = {
        (mapping.file.inode, mapping.file.device) for stack in late for mapping in stack.mappings
    }
    device = os.major(status.st_dev) << 20 | os.minor(status.st_dev)
    assert (status.st_ino, device) in keys or os.major(status.st_dev) == 0
    assert tables.loaded >= 2
    assert tables.requested == tables.loaded + sum(tables.refused.values()) + tables.pending


@pytest.mark.skipif(shutil.which("as") is None, reason="binutils is not installed")
def test_frame_pointers_are_followed_in_32_bit_processes(tmp_path):
    source, target = PROGRAMS / "i386.S", str(tmp_path / "i386")
    subprocess.run(["as", "--32", str(source), "-o", target + ".o"], check=True)
    subprocess.run(["ld", "-m", "elf_i386", target + ".o", "-o", target], check=True)
    try:
        process = subprocess.Popen([target])
    except OSError as error:
        pytest.skip(f"this kernel does not run 32-bit programs: {error}")
    try:
        with sampling(samples_per_second=499, stacks="both", target_pids=(process.pid,)) as sampler:
            result = drain_until(sampler, lambda samples: len(samples) >= 50)
    finally:
        process.kill()
        process.wait()
    listed = subprocess.run(["nm", "-n", target], capture_output=True, text=True, check=True)
    symbols = [line.split() for line in listed.stdout.splitlines()]
    starts = [int(address, 16) for address, _, _ in symbols]
    stacks = [parse_user_stack(one.words(USER_SIDE)) for one in result]

    def name(address):
        return symbols[bisect_right(starts, address) - 1][2]

    named = {
        tuple(name(address - bool(depth)) for depth, address in enumerate(stack.addresses))
        for stack in stacks
    }
    assert ("inner", "outer", "_start") in named
    assert len([stack for stack in stacks if len(stack.addresses) == 3]) >= 0.9 * len(stacks)
    assert {stack.end for stack in stacks} == {StackEnd.NO_RULE}


def test_samples_taken_before_the_first_user_instruction_have_no_user_stack():
    with spawned("bash", "-c", "while :; do /bin/true; done") as shell:
        targets = {"target_pids": (shell.pid,), "target_descendants": True}
        with sampling(samples_per_second=4999, stacks="both", **targets) as sampler:
            result = drain_until(sampler, lambda samples: len(samples) >= 4000)
    stacks = [parse_user_stack(words) for one in result if (words := one.words(USER_SIDE))]
    ends = Counter(stack.end for stack in stacks)
    assert ends[StackEnd.COMPLETE]
    # After setting end_code, execve(2) takes a few steps before setting the program's registers.
    assert ends[StackEnd.NOT_EXECUTABLE] <= len(stacks) / 100, ends
    assert len(stacks) < len(result)


@needs_gcc
def test_frame_pointers_are_followed_only_if_a_call_precedes_the_return_address(compiled, loader):
    program = compiled("-O2", "-fomit-frame-pointer")
    settings = {"samples_per_second": 499, "stacks": "user", "user_unwinding": "frame_pointers"}
    with running(program) as pid:
        with sampling(target_pids=(pid,), **settings) as sampler:
            result = drain_until(sampler, lambda samples: len(samples) >= 100)
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for sample in result:
                stack = parse_user_stack(sample.words(USER_SIDE))
                assert stack.end is not StackEnd.COMPLETE
                for pc in stack.addresses[1:]:
                    memory.seek(pc - 7)
                    code = memory.read(7)
                    assert code[2] == 0xE8 or 0xFF in code[:6], code.hex()


@needs_gcc
def test_a_forked_child_does_not_change_the_parents_unwind_tables(compiled):

    def is_complete(sample):
        return parse_user_stack(sample.words(USER_SIDE)).end is StackEnd.COMPLETE

    with (
        running(compiled("-O2", "-fomit-frame-pointer")) as pid,
        sampling(samples_per_second=499, stacks="user", target_pids=(pid,)) as sampler,
    ):
        check_in_child(lambda: None)
        drain_until(sampler, lambda samples: any(map(is_complete, samples)))
