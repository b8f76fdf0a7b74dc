"""Compares demangling, source lines and inlined functions with other tools."""

import contextlib
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.rows import Row
from otel_kprofiler.elf import FileSource, read_elf, read_sections
from otel_kprofiler.host import CacheDirectory
from otel_kprofiler.symbols.user.budget import ReadingBudget
from otel_kprofiler.symbols.user.demangle import demangle
from otel_kprofiler.symbols.user.drgn_lines import DrgnLines
from otel_kprofiler.symbols.user.go import GoLines, find_go_section, read_go_symbols
from otel_kprofiler.symbols.user.lines import SymbolicLines

DATA = Path(__file__).parents[1] / "tests" / "data" / "symbols"
_RSS = """
import os, sys
from pathlib import Path
from otel_kprofiler.elf import FileSource
from otel_kprofiler.symbols.user.lines import SymbolicLines
def kib():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])
fd = os.open(sys.argv[1], os.O_RDONLY)
before = kib()
table = SymbolicLines(None).open(FileSource(fd, os.fstat(fd).st_size))
for address in map(int, sys.argv[2:]):
    table.lookup(address)
print(kib() - before)
"""


def output(*command: str, **kwargs: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, **kwargs).stdout


def microseconds_each(run: Callable[..., object], values: Sequence[object], rounds: int) -> float:
    """Returns the microseconds per value in the fastest of ``rounds`` passes."""
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        for value in values:
            run(value)
        best = min(best, time.perf_counter() - started)
    return best / len(values) * 1e6


def demangle_rows(rounds: int) -> Iterator[Row]:
    """Yields the demangling time per name, in microseconds, without a cache."""
    library = output("gcc", "-print-file-name=libstdc++.so.6").strip()
    exported = output("nm", "-D", "--format=posix", library).splitlines()
    cxx = [line.split()[0].partition("@")[0] for line in exported if line.startswith("_Z")]
    rust = [row.split("\t")[0] for row in (DATA / "rust_names.tsv").read_text().splitlines()]
    for kind, names in (
        ("C++", cxx),
        ("Rust v0", [name for name in rust if name.startswith("_R")]),
        ("Rust legacy", [name for name in rust if name.startswith("_Z")]),
        ("C", ["malloc", "vfprintf.isra.0", "main"] * 100),
    ):
        each = microseconds_each(demangle, names, rounds)
        yield Row(f"demangle: {kind}", f"{each:.1f} us a name", f"{len(names)} names")


def return_addresses(path: str) -> list[int]:
    """Returns the return addresses of all calls, minus one, in random order."""
    text = output("objdump", "-d", "--no-show-raw-insn", "-j", ".text", path)
    result = re.findall(r"^ +([0-9a-f]+):\t(\S+)", text, re.MULTILINE)
    pairs = itertools.pairwise(result)
    calls = [int(after[0], 16) - 1 for (_, name), after in pairs if name.startswith("call")]
    random.Random(1).shuffle(calls)
    return calls


def line_rows(folder: str, rounds: int) -> Iterator[Row]:
    """Measures lines and inlined functions for a program with a few dozen kilobytes of code."""
    path = f"{folder}/program"
    output("g++", "-O2", "-g", "-o", path, str(DATA / "inlines.cc"))
    addresses = return_addresses(path)
    fd = os.open(path, os.O_RDONLY)
    source = FileSource(fd, os.fstat(fd).st_size)
    cache = CacheDirectory(f"{folder}/cache", 1 << 30)
    opener = SymbolicLines(cache)
    started = time.perf_counter()
    table = opener.open(source)
    converted = time.perf_counter() - started
    (kept,) = os.scandir(cache.path)
    yield Row(
        "lines: convert, in a child process", f"{converted * 1e3:.0f} ms",
        f"{kept.stat().st_size / 1e3:.0f} kB kept of {source.size / 1e3:.0f} kB",
    )  # fmt: skip
    opened = microseconds_each(lambda _: opener.open(source), range(100), rounds)
    yield Row("lines: open cached lines", f"{opened:.0f} us")
    frames = sum(len(table.lookup(address)) for address in addresses) / len(addresses)
    each = microseconds_each(table.lookup, addresses, rounds)
    yield Row("lines: an address", f"{each:.1f} us", f"{frames:.1f} functions", goal="<= 20 us")
    first = microseconds_each(opener.open(source).lookup, addresses, 1)
    yield Row("lines: an address, with names not met before", f"{first:.1f} us")
    if shutil.which("llvm-symbolizer-14"):
        command = ["llvm-symbolizer-14", "--inlines", "-e", path]
        text = "\n".join(map(hex, addresses))
        started = time.perf_counter()
        output(*command, input=text)
        llvm = (time.perf_counter() - started) / len(addresses) * 1e6
        yield Row(
            "lines: an address", f"{each:.1f} us", f"llvm-symbolizer {llvm:.0f} us", each / llvm
        )
    drgn = DrgnLines(source, path)
    waited = microseconds_each(drgn.lookup, addresses[:200], min(rounds, 2))
    drgn.close()
    yield Row(
        "lines: an address", f"{each:.1f} us", f"drgn in its worker {waited:.0f} us", each / waited
    )
    shown = output(sys.executable, "-c", _RSS, path, *map(str, addresses[:500]))
    yield Row("lines: RSS of this process", f"+{int(shown) / 1e3:.1f} MB", "500 addresses")
    cache.close()
    os.close(fd)


def go_rows(rounds: int) -> Iterator[Row]:
    """Measures line and inlining lookups in the ``go`` binary, at one address per function."""
    path = shutil.which("go")
    if not path:
        return
    fd = os.open(path, os.O_RDONLY)
    source = FileSource(fd, os.fstat(fd).st_size)
    elf = read_elf(source, None)
    sections = read_sections(source, elf)
    section = find_go_section(sections)
    if section:
        symbols = read_go_symbols(source, elf, sections, ReadingBudget())
        functions = [pair for pair in zip(symbols.values, symbols.sizes, strict=True) if pair[1]]
        choice = random.Random(1)
        met = choice.sample(functions, min(3000, len(functions)))
        addresses = [choice.randrange(start, start + size) for start, size in met]
        each, frames = float("inf"), 0.0
        for _ in range(rounds):
            with contextlib.closing(GoLines(source, elf, sections, section)) as table:
                each = min(each, microseconds_each(table.lookup, addresses, 1))
                frames = sum(len(table.lookup(address)) for address in addresses) / len(addresses)
        yield Row(
            "lines: Go, a function not met before", f"{each:.1f} us", f"{frames:.1f} functions",
            goal="<= 20 us",
        )  # fmt: skip
    os.close(fd)


def rows(quick: bool) -> list[Row]:
    rounds = 3 if quick else 10
    with tempfile.TemporaryDirectory() as folder:
        return [*demangle_rows(rounds), *line_rows(folder, rounds), *go_rows(rounds)]
