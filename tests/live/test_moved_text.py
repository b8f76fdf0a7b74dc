"""Text moved to anonymous memory is resolved and unwound with its file's symbols and tables."""

import shutil
import subprocess
from pathlib import Path

import pytest
from samplers import spawned
from unwind_maps import compile_c

from tests.commands import run_checked, run_command
from tests.windows import read_stacks

pytestmark = pytest.mark.live

# The program copies a page of its text and maps the copy over the page, as huge-page libraries do.
# With APART, the copy runs at a different address, outside all mappings of the file.
MOVES = r"""
    #define _GNU_SOURCE
    #include <string.h>
    #include <sys/mman.h>
    #include <unistd.h>
    #define MOVED __attribute__((noinline, section("moved")))
    MOVED __attribute__((aligned(4096))) void inner(volatile long *n)
    {
        for (int i = 0; i < 1000; i++)
            ++*n;
    }
    MOVED void outer(volatile long *n) { inner(n); ++*n; }
    MOVED void outermost(volatile long *n) { outer(n); ++*n; }
    MOVED __attribute__((aligned(4096))) void behind(void) {}
    int main(void)
    {
        void (*run)(volatile long *) = outermost;
        volatile long n = 0;
        char *copy = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memcpy(copy, inner, 4096);
        mprotect(copy, 4096, PROT_READ | PROT_EXEC);
    #ifdef APART
        run = (void *)(copy + ((char *)outermost - (char *)inner));
    #else
        mremap(copy, 4096, 4096, MREMAP_MAYMOVE | MREMAP_FIXED, inner);
    #endif
        write(1, "moved\n", 6);
        for (;;)
            run(&n);
    }
"""
WHOLE = ["main", "outermost", "outer", "inner"]
SPIN = """
const zlib = require("zlib"), content = Buffer.alloc(1 << 20, "abcdef");
console.log("moved");
for (;;) zlib.deflateSync(content);
"""


def record(pid, directory, seconds):
    output = Path(directory, "profile.folded")
    path = directory / "x.otlp"
    words = ["-p", pid, "-d", f"{seconds}s", "--stacks", "both", "--force", "-o", path]
    run_checked("record", *words)
    run_checked("report", path, "--force", "-o", output)
    lines = [line.rpartition(" ") for line in output.read_text().splitlines()]
    return [(stack.split(";"), int(count)) for stack, _, count in lines]


def read_functions(directory):
    """Returns each sample's functions, outermost first, with the samples in time order."""
    stacks = read_stacks(directory / "x.otlp")
    return [[frame.function for frame in reversed(stack.frames)] for stack in stacks]


def record_moved(command, directory, is_enough=bool):
    """Records a program, for longer if necessary. Returns the program's stacks and mappings."""
    with spawned(*command, stdout=subprocess.PIPE) as run:
        if b"moved" not in run.stdout.readline():
            return [], ""
        maps = Path(f"/proc/{run.pid}/maps").read_text()
        for seconds in (2, 8, 30):
            if is_enough(stacks := record(run.pid, directory, seconds)):
                break
        return stacks, maps


def holes(maps, path):
    """Returns anonymous executable mappings that lie between two mappings of ``path``."""
    lines = [line.split() for line in maps.splitlines()]
    return [
        line
        for before, line, after in zip(lines, lines[1:], lines[2:], strict=False)
        if "x" in line[1] and len(line) == 5 and before[-1] == after[-1] == path
    ]


def test_stacks_in_moved_text_are_complete_and_named(tmp_path):
    program = compile_c(tmp_path / "moves", MOVES)

    def has_whole(stacks):
        return any(stack[-4:] == WHOLE for stack, _ in stacks)

    stacks, maps = record_moved([program], tmp_path, has_whole)
    assert holes(maps, str(program)), maps
    samples = read_functions(tmp_path)
    in_text = [stack for stack in samples if stack[-1] == "inner"]
    assert len(in_text) > 0.7 * len(samples), stacks
    is_whole = [stack[-4:] == WHOLE for stack in in_text]
    assert any(is_whole), stacks
    # The first samples are taken before the table is loaded. A busy machine may delay loading.
    later = is_whole[is_whole.index(True) :]
    assert sum(later) > 0.9 * len(later), stacks


def test_symbolize_resolves_an_address_in_moved_text(tmp_path):
    program = compile_c(tmp_path / "moves", MOVES, "-no-pie")
    symbols = subprocess.run(["nm", program], capture_output=True, text=True, check=True).stdout
    start = next(line.split()[0] for line in symbols.splitlines() if line.endswith(" outer"))
    with spawned(program, stdout=subprocess.PIPE) as run:
        assert b"moved" in run.stdout.readline()
        done = run_command("symbolize", "--pid", run.pid, f"0x{start}")
    assert "outer" in done.stdout, done.stdout + done.stderr


def test_functions_in_moved_text_are_unnamed_unless_file_mappings_surround_it(tmp_path):
    stacks, _ = record_moved([compile_c(tmp_path / "apart", MOVES, "-DAPART")], tmp_path)
    assert stacks
    assert not [stack for stack, _ in stacks if {"inner", "outer", "outermost"} & {*stack}]


def test_frames_in_node_running_on_large_pages_are_named(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here")
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not pages.exists() or "[never]" in pages.read_text():
        pytest.skip("transparent huge pages are disabled, so node does not move its text")
    stacks, maps = record_moved([node, "--use-largepages=on", "-e", SPIN], tmp_path)
    if not holes(maps, str(Path(node).resolve())):
        pytest.skip("this node does not move its text")
    assert stacks
    named = sum(count for stack, count in stacks if not stack[-1].startswith("["))
    assert named > 0.7 * sum(count for _, count in stacks), stacks
