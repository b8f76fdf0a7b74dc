"""User stacks from real processes have files and addresses that match the files' symbols."""

import os
import signal
import subprocess
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from samplers import spawned, started
from unwind_maps import compile_c

from otel_kprofiler.model import STACK_OK, TRUNCATED_STACKS, KnownFiles, Side, StackEnd, Unresolved
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from otel_kprofiler.symbols import UserResolver
from tests.needs import LIBBPF
from tests.waiting import wait_until

pytestmark = [pytest.mark.live, LIBBPF]

SPINS = """
    #include <stdlib.h>
    volatile long count;
    __attribute__((noinline)) int spin(const void *a, const void *b)
    {
        for (int i = 0; i < 100000; i++)
            count++;
        return *(const char *)a - *(const char *)b;
    }
    __attribute__((noinline)) void sorts(void)
    {
        char text[] = "a text to be sorted";
        qsort(text, sizeof(text), 1, spin);
        count++;
    }
    int main(void) { for (;;) sorts(); }
"""
RUNS_CODE = """
    #include <string.h>
    #include <sys/mman.h>
    static const unsigned char code[] = {
        0x55, 0x48, 0x89, 0xe5, /* push %rbp; mov %rsp,%rbp */
        0xb9, 0x00, 0x00, 0x10, 0x00, /* mov $0x100000,%ecx */
        0xff, 0xc9, 0x75, 0xfc, /* dec %ecx; jnz */
        0x5d, 0xc3, /* pop %rbp; ret */
    };
    volatile long count;
    __attribute__((noinline)) void calls(void (*made)(void)) { made(); count++; }
    int main(void)
    {
        void *made = mmap(0, 4096, 7, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memcpy(made, code, sizeof(code));
        for (;;)
            calls(made);
    }
"""


FORKS = """
    #include <stdlib.h>
    #include <unistd.h>
    volatile long count;
    static int child;
    __attribute__((noinline)) int spin(const void *a, const void *b)
    {
        if (!child++ && !fork())
            for (;;)
                count++;
        return *(const char *)a - *(const char *)b;
    }
    int main(void)
    {
        char text[] = "a text to be sorted";
        qsort(text, sizeof(text), 1, spin);
        for (;;)
            pause();
    }
"""


@contextmanager
def running(*command, **options):
    with spawned(*command, **options) as process:
        yield process.pid


def take_sides(pid, enough):
    """Samples a process, and returns its user stacks up to the first that satisfies ``enough``."""
    known = KnownFiles()
    config = SamplerConfig(samples_per_second=499, stacks="user", target_pids=(pid,))
    resolver, results = UserResolver(known), []
    with started(EbpfSampler(config, user_files=known)) as sampler:

        def has_enough():
            for sample in sampler.drain():
                for raw in sample.sides:
                    side = resolver.resolve(raw, None)
                    results.append(side if isinstance(side, Side) else side.of(sample))
            return any(map(enough, results))

        wait_until(has_enough, say=lambda: [f for side in results for f in side.frames])
    return [side for side in results if enough(side)]


def symbols(path):
    with open(path, "rb") as file:
        elf = ELFFile(file)
        return [
            (symbol["st_value"], symbol["st_size"], symbol.name)
            for table in [elf.get_section_by_name(name) for name in (".symtab", ".dynsym")]
            if table
            for symbol in table.iter_symbols()
            if symbol["st_info"]["type"] == "STT_FUNC"
        ]


def mapped_symbols(pid):
    """Returns the functions in the files that a process executes, by file name."""
    with open(f"/proc/{pid}/maps") as maps:
        rows = [line.split() for line in maps]
    paths = {row[5] for row in rows if row[1] == "r-xp" and row[-1].startswith("/")}
    return {os.path.basename(path): symbols(path) for path in paths}


def functions(side, files):
    names = []
    for frame in side.frames:
        results = {
            name
            for start, size, name in (files.get(frame.module.name, ()) if frame.module else ())
            if start <= frame.address < start + size
        }
        names.append(min(results, default=f"{frame.module.name if frame.module else ''}?"))
    return names


def reaches_main(side):
    return not side.is_provisional and side.status == 0 and len(side.frames) > 4


@pytest.mark.parametrize(
    "flags", [("-fPIE", "-pie"), ("-no-pie",), ("-static",), ("-Wl,-z,noseparate-code",)]
)
def test_sampled_addresses_match_the_symbols_of_their_files(tmp_path, flags):
    program = compile_c(tmp_path / "sorts", SPINS, "-O1", "-fomit-frame-pointer", *flags)
    with running(program) as pid:
        sides = take_sides(pid, reaches_main)
        files = mapped_symbols(pid)
    checked = 0
    for side in sides:
        names = functions(side, files)
        if names[0] == "spin":
            checked += 1
            assert "sorts" in names
            assert names[names.index("sorts") + 1] == "main"
            module = side.frames[0].module
            assert module.extent.start <= side.frames[0].address < module.extent.end
    assert checked


def test_a_forked_child_has_complete_stacks(tmp_path):
    """A forked child maps code pages only when it runs them, so its callers' pages are unmapped."""
    with running(compile_c(tmp_path / "forks", FORKS, "-O1", "-fomit-frame-pointer")) as pid:
        children = Path(f"/proc/{pid}/task/{pid}/children")
        while not (child := children.read_text().strip()):
            time.sleep(0.01)
        try:
            sides = take_sides(int(child), reaches_main)
            files = mapped_symbols(pid)
        finally:
            os.kill(int(child), signal.SIGKILL)
    for side in sides:
        names = functions(side, files)
        assert names[0] == "spin"
        assert "main" in names


def test_a_stack_ends_at_the_dynamic_linkers_entry_point(tmp_path):
    """Short-lived programs spend most of their time in the dynamic linker."""
    known = KnownFiles()
    config = SamplerConfig(samples_per_second=1999, stacks="user")
    program = compile_c(tmp_path / "short", "int main(void) { return 0; }", "-O1")
    with open(os.path.realpath("/lib64/ld-linux-x86-64.so.2"), "rb") as file:
        entry = ELFFile(file).header["e_entry"]
    resolver, ends = UserResolver(known), Counter()
    with started(EbpfSampler(config, user_files=known)) as sampler:

        def has_enough():
            for _ in range(20):
                subprocess.run([program], check=True)
            for sample in sampler.drain():
                if sample.comm == b"short":
                    side = resolver.resolve(sample.sides[0], None)
                    side = side if isinstance(side, Side) else side.of(sample)
                    last = side.frames[-1]
                    is_loading = TRUNCATED_STACKS.get(side.status) is StackEnd.PENDING
                    if last.module and 0 <= last.address - entry < 64 and not is_loading:
                        ends[side.status] += 1
            return ends[STACK_OK] >= 20

        wait_until(has_enough)
    assert set(ends) == {STACK_OK}


def test_a_deleted_program_is_marked_as_deleted(tmp_path):
    program = compile_c(tmp_path / "sorts", SPINS, "-O1")
    with running(program) as pid:
        program.unlink()
        sides = take_sides(pid, reaches_main)
    assert {side.frames[0].module.name for side in sides} <= {"sorts (deleted)", "libc.so.6"}
    assert any(side.frames[-1].module.name == "sorts (deleted)" for side in sides)


def test_generated_code_has_no_file(tmp_path):
    program = compile_c(tmp_path / "runs", RUNS_CODE, "-O1", "-fno-omit-frame-pointer")
    files = {"runs": symbols(program)}
    with running(program) as pid:
        sides = take_sides(pid, lambda side: reaches_main(side) and side.frames[0].module is None)
    for side in sides:
        made, caller = side.frames[:2]
        assert (made.unresolved, made.module) == (Unresolved.NO_FILE, None)
        assert caller.found_by == "frame_pointer"
        assert functions(side, files)[1] == "calls"
