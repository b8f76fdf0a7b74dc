"""Measures the cost of reading all BPF symbols by each method, and of tracking changes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.rows import Row
from otel_kprofiler.bpf.libbpf import LibbpfLoader
from otel_kprofiler.symbols import KernelSymbolizer
from otel_kprofiler.tracking import KsymbolWatch
from otel_kprofiler.tracking.program_iterator import read_programs
from otel_kprofiler.tracking.programs import ProgramReader

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/live"))
from programs import churn_command, close_all, load


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def best_ms(function: Callable[[], object], tries: int) -> float:
    took = []
    for _ in range(tries):
        started = time.perf_counter()
        function()
        took.append(time.perf_counter() - started)
    return min(took) * 1000


def read_kallsyms() -> bytes:
    with open("/proc/kallsyms", "rb", buffering=0) as file:
        return file.readall()


def baseline(count: int, tries: int) -> Iterator[Row]:
    """Compares methods of reading ``count`` programs' symbols with reading all of kallsyms."""
    fds = [load(number) for number in range(count)]
    known = ProgramReader()
    known.read()
    kallsyms = best_ms(read_kallsyms, 1 if count > 5000 else tries)
    ways: tuple[tuple[str, Callable[[], object]], ...] = (
        ("bpf(2)", lambda: ProgramReader().read()),
        ("bpf(2), programs known before", known.read),
        ("iterator, with its load", lambda: read_programs(LibbpfLoader())),
    )
    for name, read in ways:
        took = best_ms(read, tries)
        yield Row(
            f"{count} BPF programs by {name}",
            f"{took:.0f} ms",
            f"kallsyms {kallsyms:.0f} ms",
            took / kallsyms,
        )
    close_all(fds)


def churn(seconds: float, standing: int) -> Row:
    """Measures CPU time at 1,000 loads and unloads/s, with ``standing`` other programs loaded."""
    fds = [load(1_000_000 + number, name="standing") for number in range(standing)]
    watch = KsymbolWatch()
    symbolizer = KernelSymbolizer.live(ksymbols=watch)
    symbolizer.advance(now_ns())
    with subprocess.Popen(churn_command(seconds, "bench"), stdout=subprocess.PIPE) as process:
        started, cpu = time.monotonic(), time.process_time()
        while process.poll() is None:
            time.sleep(0.25)
            symbolizer.advance(now_ns())
        share = (time.process_time() - cpu) / (time.monotonic() - started)
        elapsed = time.monotonic() - started
        assert process.stdout is not None
        loads = int(process.stdout.read())
    lost = sum(watch.counts().lost.values())
    symbolizer.close()
    close_all(fds)
    return Row(
        f"following {loads / elapsed:.0f} loads/s beside {standing} programs",
        f"{share:.1%} of a core, {lost} lost",
        f"{watch.counts().kallsyms_reads} reads of kallsyms",
        goal="≤ 5 %, ≤ 1 read",
    )


def latency_ms(tries: int) -> float:
    """Returns the longest time until a loaded program's name is found, polling every 5 ms."""
    watch = KsymbolWatch()
    symbolizer = KernelSymbolizer.live(ksymbols=watch)
    symbolizer.advance(now_ns())
    worst = 0.0
    for number in range(tries):
        fd = load(number, name=f"latency{number}")
        started = time.perf_counter()
        while not any(
            m.name.endswith(f"latency{number}") for m in symbolizer.find("bpf_prog_", prefix=True)
        ):
            time.sleep(0.005)
            symbolizer.advance(now_ns())
        worst = max(worst, time.perf_counter() - started)
        os.close(fd)
    symbolizer.close()
    return worst * 1000


def rows(quick: bool) -> Iterator[Row]:
    for count in (1000,) if quick else (1000, 10_000):
        yield from baseline(count, 3)
    yield churn(5 if quick else 60, 1000 if quick else 10_000)
    yield Row("BPF load to name", f"{latency_ms(20):.0f} ms at worst of 20", goal="≤ 250 ms")
