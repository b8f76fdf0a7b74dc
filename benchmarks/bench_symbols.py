"""Kernel symbols: load time (compared with only reading the file), size, lookups and memory."""

import gc
import lzma
import os
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.rows import Row
from otel_kprofiler.host import Access
from otel_kprofiler.symbols import KernelSymbolizer
from otel_kprofiler.symbols.kernel.kallsyms import parse_kallsyms
from otel_kprofiler.symbols.kernel.read import read_pieces
from otel_kprofiler.symbols.kernel.table import SymbolTable

KALLSYMS = "/proc/kallsyms"
FIXTURE = Path(os.environ.get("KPROFILER_FIXTURES", ""), "6.12-debian", "kallsyms.xz")
_RSS = """
from pathlib import Path
from otel_kprofiler.host import Access
from otel_kprofiler.symbols import KernelSymbolizer
def kib(key):
    return int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0])
before = kib("VmRSS")
kept = KernelSymbolizer.live(Access())
print(kib("VmRSS") - before, kib("VmHWM") - before)
"""


def read_bare() -> None:
    descriptor = os.open(KALLSYMS, os.O_RDONLY)
    while os.read(descriptor, 65_536):
        pass
    os.close(descriptor)


def load() -> None:
    parse_kallsyms(read_pieces(os.open(KALLSYMS, os.O_RDONLY)))


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def table_rows(path: str, kernel: str) -> Iterator[Row]:
    gc.collect()
    tracemalloc.start()
    parsed = parse_kallsyms(read_pieces(os.open(path, os.O_RDONLY)))
    gc.collect()
    steady, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tables = [parsed.core, *parsed.blocks.values()]
    count, size = (sum(map(f, tables)) for f in (len, SymbolTable.size_bytes))
    yield Row(
        f"{kernel}: per kept symbol", f"{size / count:.1f} B", f"{count} symbols", goal="<= 28 B"
    )
    yield Row(
        f"{kernel}: tables", f"{steady / 1e6:.2f} MB",
        f"peak while loading {peak / 1e6:.2f} MB", peak / steady, "<= 2x",
    )  # fmt: skip
    rng = random.Random(1)
    core = parsed.core
    addresses = [core.address(rng.randrange(len(core))) + 5 for _ in range(4_000)]
    result = microseconds_each(core.lookup, addresses, 5)
    yield Row(f"{kernel}: look-up of a new address", f"{result:.2f} us", goal="<= 1.0 us")


def microseconds_each(run: Callable[[int], object], values: list[int], rounds: int) -> float:
    """Returns the µs per value in the fastest of several passes, including loop overhead."""
    best = min(seconds(lambda: [run(value) for value in values]) for _ in range(rounds))
    return best / len(values) * 1e6


def rows(quick: bool) -> Iterator[Row]:
    rounds = 5 if quick else 25
    pairs = [(seconds(read_bare), seconds(load)) for _ in range(rounds)]
    bare, loaded = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
    yield Row(
        "kallsyms into a table",
        f"{loaded * 1e3:.1f} ms",
        f"bare read {bare * 1e3:.1f} ms",
        loaded / bare,
        "<= 1.35x on two idle CPUs",
    )
    symbolizer = KernelSymbolizer.live(Access())
    snapshot = symbolizer.snapshot
    count = snapshot.symbol_count()
    yield Row(
        "table, bytes per kept symbol",
        f"{snapshot.size_bytes() / count:.1f} B",
        f"{count} symbols",
        goal="<= 28 B",
    )
    yield from table_rows(KALLSYMS, "host kernel")
    if FIXTURE.exists():
        with tempfile.NamedTemporaryFile() as unpacked:
            unpacked.write(lzma.decompress(FIXTURE.read_bytes()))
            unpacked.flush()
            yield from table_rows(unpacked.name, "6.12 with 126 modules")
    text = snapshot.modules[0].ranges[0]
    rng = random.Random(1)
    addresses = [rng.randrange(text.start, text.end) for _ in range(8_000)]
    made = microseconds_each(snapshot.frame, addresses, rounds)
    yield Row("new frame, with its strings", f"{made:.2f} us")
    frames = symbolizer._views[0].frames
    cached = microseconds_each(frames.__getitem__, addresses[:1_000], rounds)
    yield Row("cached frame", f"{cached:.3f} us", goal="<= 0.1 us")
    done = subprocess.run([sys.executable, "-c", _RSS], capture_output=True, text=True, check=True)
    steady, peak = (int(value) * 1024 / 1e6 for value in done.stdout.split())
    yield Row("memory of the process, steady", f"+{steady:.1f} MB", goal="<= 5 MB")
    yield Row("memory of the process, peak", f"+{peak:.1f} MB", goal="<= 8 MB")


if __name__ == "__main__":
    for row in rows(quick="--quick" in sys.argv):
        print(row)
