"""Hostile DWARF: each file yields lines or a clear error, in bounded time and memory."""

import os
import random
import resource
import subprocess
import time
from pathlib import Path

import pytest

from otel_kprofiler.elf import ElfError, FileSource, read_debug_elf, read_sections
from otel_kprofiler.host import CpuRate
from otel_kprofiler.symbols.user.convert_lines import has_split_units
from otel_kprofiler.symbols.user.drgn_lines import DrgnLines, WorkerLimits
from otel_kprofiler.symbols.user.lines import ConversionLimits, SymbolicLines
from otel_kprofiler.symbols.user.lines_error import LinesError
from tests.further import further

pytestmark = pytest.mark.fuzz
ROUNDS = int(os.environ.get("KPROFILER_DWARF_ROUNDS", "6"))
LIMITS = ConversionLimits(
    memory_bytes=512 << 20, result_bytes=16 << 20, cpu=CpuRate(10, 0, 10), wall_s=60.0
)
CODE = b"""
static inline int leaf(int a) { return a * 3 + 1; }
static inline int middle(int a) { return leaf(a) + leaf(a + 1); }
__attribute__((noinline)) int outer(int a) { return middle(a) / (a + 7); }
int main(int count, char **words) { return outer(count) + outer((int)(long)words); }
"""
VALUES = [0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 64) - 1]


@pytest.fixture(scope="module", params=["5", *further("4")])
def program(request, tmp_path_factory):
    """Compiles a small program, and returns its content and the offset ranges of its DWARF."""
    path = tmp_path_factory.mktemp("dwarf") / "program"
    command = ["gcc", "-O2", "-g", f"-gdwarf-{request.param}", "-x", "c", "-o", path, "-"]
    subprocess.run(command, input=CODE, check=True)
    with path.open("rb") as file:
        source = FileSource(file.fileno(), path.stat().st_size)
        sections = read_sections(source, read_debug_elf(source))
    places = [
        range(one.offset, one.offset + one.size)
        for one in sections
        if one.name.startswith(b".debug")
    ]
    return path.read_bytes(), places


def damage(content, places, rng):
    """Returns the content with numbers in DWARF or headers changed, and sometimes truncated."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 3, 30])):
        place = rng.choice([*places, range(64)] if rng.random() < 0.1 else places)
        at = rng.choice(place)
        size = rng.choice([1, 1, 2, 4, 8])
        value = rng.choice([*VALUES, rng.randrange(1 << 16)]) & (1 << 8 * size) - 1
        data[at : at + size] = value.to_bytes(size, "little")
    if rng.random() < 0.05:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


@pytest.mark.parametrize("reader", ["symbolic", *further("drgn")])
def test_corrupt_dwarf_is_read_or_rejected(reader, program, tmp_path):
    content, places = program
    rng = random.Random(ROUNDS)
    path = tmp_path / "damaged"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    known = 0
    for _ in range(ROUNDS):
        path.write_bytes(damage(content, places, rng))
        started = time.monotonic()
        with path.open("rb") as file:
            source = FileSource(file.fileno(), path.stat().st_size)
            try:
                if reader == "symbolic":
                    table = SymbolicLines(None, LIMITS).open(source)
                else:
                    limits = WorkerLimits(memory_bytes=512 << 20, open_s=10.0, answer_s=5.0)
                    table = DrgnLines(source, str(path), limits=limits)
            except (LinesError, ElfError) as error:
                assert len(str(error)) < 500  # noqa: PT017 - most are not refused
                continue
        for address in range(0x1000, 0x1200, 5):
            lines = table.lookup(address)
            known += bool(lines)
            assert len(lines) <= 1000
        table.close()
        assert time.monotonic() - started < 120
    assert known
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_arbitrary_dwarf_abbreviations_are_parsed_safely():
    rng = random.Random(1)
    for _ in range(300):
        data = bytes(rng.choice([0, 1, 0x21, 0x76, 0x80, 0xFF]) for _ in range(rng.randrange(60)))
        assert has_split_units(data) in {True, False}


def test_a_split_dwarf_reference_to_a_pipe_does_not_block_the_reader(tmp_path):
    """Split DWARF can be at an arbitrary path. The time limit also applies to opening a pipe."""
    subprocess.run(
        ["gcc", "-g", "-gsplit-dwarf", "-x", "c", "-c", "-o", "part.o", "-"],
        input=CODE, check=True, cwd=tmp_path,
    )  # fmt: skip
    subprocess.run(["gcc", "-o", "program", "part.o"], check=True, cwd=tmp_path)
    for dwo in Path(tmp_path).glob("*.dwo"):
        dwo.unlink()
        os.mkfifo(dwo)
    started = time.monotonic()
    limits = WorkerLimits(open_s=10.0, answer_s=1.0)
    with (tmp_path / "program").open("rb") as file:
        size = (tmp_path / "program").stat().st_size
        try:
            table = DrgnLines(FileSource(file.fileno(), size), str(file.name), limits=limits)
        except LinesError:
            return
    table.lookup(0x1140)
    table.close()
    assert time.monotonic() - started < 60
