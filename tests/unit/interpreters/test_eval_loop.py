"""The evaluation loop is found in binaries, even if the compiler split off the cold part."""

import os
import shutil
import subprocess

import pytest

from otel_kprofiler.elf import FileSource, ImageSource, find_symbols, read_elf, read_sections
from otel_kprofiler.interpreters.eval_loop import find_loop

TOOLS = {
    "x86_64": ("gcc", "strip"),
    "aarch64": ("aarch64-linux-gnu-gcc-12", "aarch64-linux-gnu-strip"),
}
machines = pytest.mark.parametrize("machine", TOOLS)
RARE = "\n".join(f"if (code[i] & {1 << n}) rare({n});" for n in range(9))
SOURCE = """
volatile int seen;
__attribute__((cold, noinline)) void rare(int n) { seen = n; }
__attribute__((noinline)) int loop(const int *code, int n)
{
	int sum = 0;
	for (int i = 0; i < n; i++) {
		%s
		sum = sum * 31 + code[i];
	}
	return sum;
}
"""


def build(folder, body, machine):
    compiler, strip = TOOLS[machine]
    if not (shutil.which(compiler) and shutil.which(strip)):
        pytest.skip(f"{compiler} is not installed")
    path, source = folder / "loop", folder / "loop.c"
    source.write_text(SOURCE % body)
    options = ("-O2", "-freorder-blocks-and-partition", "-shared", "-fPIC", "-nostdlib")
    subprocess.run([compiler, *options, source, "-o", path], check=True)
    return path


def find(path):
    with open(path, "rb") as file:
        source = FileSource(file.fileno(), os.fstat(file.fileno()).st_size)
        elf = read_elf(source, None)
        symbol = find_symbols(source, read_sections(source, elf), (b"loop",))[b"loop"]
        return find_loop(source, elf, symbol), symbol


def expected_part(path, name):
    """Returns a symbol's address range from the unstripped file."""
    lines = subprocess.run(["nm", "-S", path], check=True, capture_output=True, text=True).stdout
    for words in map(str.split, lines.splitlines()):
        if words[-1] == name and len(words) == 4:
            return range(int(words[0], 16), int(words[0], 16) + int(words[1], 16))
    raise AssertionError(lines)


@pytest.mark.system
@machines
def test_the_cold_part_of_the_eval_loop_is_located_without_its_symbol(tmp_path, machine):
    path = build(tmp_path, RARE, machine)
    parts = expected_part(path, "loop"), expected_part(path, "loop.cold")
    subprocess.run([TOOLS[machine][1], path], check=True)
    assert find(path)[0] == parts


@pytest.mark.system
@machines
def test_an_eval_loop_without_a_cold_part_is_one_range(tmp_path, machine):
    path = build(tmp_path, "if (code[i] == 5) sum++;", machine)
    assert find(path)[0] == (expected_part(path, "loop"),)


@pytest.mark.system
@machines
def test_only_the_hot_part_is_found_if_the_unwind_information_is_malformed(tmp_path, machine):
    path = build(tmp_path, RARE, machine)
    result, symbol = find(path)
    assert len(result) == 2
    content = path.read_bytes()
    elf = read_elf(ImageSource(content), None)
    for search in (None, (1 << 60, 100), (elf.search[0], 13)):
        assert find_loop(ImageSource(content), elf._replace(search=search), symbol) == result[:1]
