"""Measures load time, lookup time and memory usage of several libraries' function tables."""

import gc
import importlib
import importlib.util
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from elftools.elf.elffile import ELFFile

from benchmarks.rows import Row
from otel_kprofiler.elf import FileSource, read_elf
from otel_kprofiler.symbols.user.build import read_functions
from otel_kprofiler.symbols.user.functions import FunctionTable

FILES = (
    "/lib/x86_64-linux-gnu/libc.so.6",
    "/usr/bin/python3",
    "/usr/lib/x86_64-linux-gnu/libstdc++.so.6",
    "/usr/lib/x86_64-linux-gnu/libLLVM-14.so.1",
)
LOOKUPS = 20_000


def ours(path: str) -> FunctionTable:
    """Reads the names, stubs and bounds of all functions."""
    with open(path, "rb") as file:
        source = FileSource(file.fileno(), os.fstat(file.fileno()).st_size)
        return read_functions(source, read_elf(source))


def by_pyelftools(path: str) -> list[tuple[int, int, str]]:
    """Reads only the symbols; does not name stubs or infer missing bounds."""
    with open(path, "rb") as file:
        elf = ELFFile(file)
        table = elf.get_section_by_name(".symtab") or elf.get_section_by_name(".dynsym")
        return sorted(
            (symbol["st_value"], symbol["st_size"], symbol.name)
            for symbol in table.iter_symbols()
            if symbol["st_info"]["type"] in ("STT_FUNC", "STT_LOOS") and symbol["st_value"]
        )


def by_symbolic(path: str) -> Any:
    """Builds symbolic's table from symbols, and from DWARF if available."""
    debuginfo = importlib.import_module("symbolic.debuginfo")
    return next(iter(debuginfo.Archive.open(path).iter_objects())).make_symcache()


def least_ms(make: Callable[[str], Any], path: str, runs: int) -> float:
    """Returns the duration of the fastest run, in ms. Collects garbage before each run."""
    times = []
    for _ in range(runs):
        gc.collect()
        began = time.perf_counter()
        make(path)
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


def each_us(lookup: Callable[[int], Any], addresses: list[int]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for address in addresses:
            lookup(address)
        times.append(time.perf_counter() - began)
    return min(times) / len(addresses) * 1e6


def rows(quick: bool) -> Iterator[Row]:
    runs = 3 if quick else 15
    for path in filter(os.path.exists, FILES):
        name = os.path.basename(path)
        table = ours(path)
        rng = random.Random(1)
        starts = [symbol[0] for symbol in by_pyelftools(path)]
        addresses = [rng.choice(starts) + rng.randrange(8) for _ in range(LOOKUPS)]
        took = least_ms(ours, path, runs)
        slow = least_ms(by_pyelftools, path, 1 if quick else 3)
        yield Row(
            f"{name}: {len(table)} names, stubs and bounds ready", f"{took:.1f} ms",
            f"pyelftools, names alone: {slow:.0f} ms", took / slow, "libLLVM <= 35 ms",
        )  # fmt: skip
        one = each_us(table.lookup, addresses)
        if importlib.util.find_spec("symbolic"):
            made = least_ms(by_symbolic, path, runs)
            yield Row(f"{name}: ready", f"{took:.1f} ms", f"symbolic: {made:.1f} ms", took / made)
            other = each_us(by_symbolic(path).lookup, addresses)
            yield Row(
                f"{name}: a look-up", f"{one:.2f} us", f"symbolic: {other:.2f} us", one / other,
                "<= 2 us",
            )  # fmt: skip
        else:
            yield Row(f"{name}: a look-up", f"{one:.2f} us", goal="<= 2 us")
        each = table.nbytes / max(1, len(table))
        yield Row(
            f"{name}: memory", f"{table.nbytes / 1e6:.2f} MB", f"{each:.0f} B for each name",
            goal="libLLVM <= 6 MB",
        )  # fmt: skip
