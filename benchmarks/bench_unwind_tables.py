"""Unwind tables: cost of a file, and a storm of new binaries while samples are taken."""

import contextlib
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rows import Row
from otel_kprofiler.bpf import PAGE_BYTES, create_inner_map
from otel_kprofiler.model import STACK_OK
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from otel_kprofiler.unwinding.elf import find_section, read_elf
from otel_kprofiler.unwinding.image import image_pages, write_image
from otel_kprofiler.unwinding.indexing import index_frames
from otel_kprofiler.unwinding.source import FileSource
from otel_kprofiler.unwinding.table import find_tables

FILES = (
    "/lib/x86_64-linux-gnu/libc.so.6",
    "/usr/bin/python3",
    "/usr/lib/x86_64-linux-gnu/libcrypto.so.3",
    "/usr/lib/x86_64-linux-gnu/libLLVM-14.so.1",
)
RUNS_SHORTLY = """
#include <time.h>
volatile long count;
int main(void)
{
    clock_t end = clock() + CLOCKS_PER_SEC / 50;
    while (clock() < end)
        for (int i = 0; i < 10000; i++)
            count++;
}
"""
PER_SECOND = 50


def load(path: str) -> tuple[float, float, int]:
    """CPU milliseconds to check and copy a file's tables, those of the copy alone, and bytes."""
    totals, copies, size = [], [], 0
    for _ in range(5):
        with open(path, "rb") as file:
            began = time.thread_time()
            source = FileSource(file.fileno(), os.fstat(file.fileno()).st_size)
            elf = read_elf(source)
            tables = find_tables(source, elf)
            if tables is None:
                return 0.0, 0.0, 0
            pages = image_pages(tables)
            fd = create_inner_map(pages, "bench")
            copying = time.thread_time()
            with mmap.mmap(fd, pages * PAGE_BYTES) as mapped, memoryview(mapped) as view:
                write_image(view, source, tables, elf, 1)
            os.close(fd)
            totals.append(time.thread_time() - began)
            copies.append(time.thread_time() - copying)
            size = pages * PAGE_BYTES
    return min(totals) * 1e3, min(copies) * 1e3, size


def index_ms(path: str) -> tuple[float, int]:
    """Milliseconds until the search table of a file is made in its process, and its entries."""
    with open(path, "rb") as file:
        source = FileSource(file.fileno(), os.fstat(file.fileno()).st_size)
        frames = find_section(source, read_elf(source), b".eh_frame")
        began = time.monotonic()
        tables = index_frames(file.fileno(), frames)
        return (time.monotonic() - began) * 1e3, tables.entries


def storm(seconds: float) -> Iterator[Row]:
    """New binaries, each for 20 ms, while every CPU is sampled; then the same binaries again."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        first = os.path.join(folder, "program")
        compiler = ["gcc", "-x", "c", "-O1", "-o", first, "-"]
        subprocess.run(compiler, input=RUNS_SHORTLY, text=True, check=True)
        count = int(seconds * PER_SECOND)
        paths = [shutil.copy(first, f"{first}-{number}") for number in range(count)]
        sampler = EbpfSampler(SamplerConfig(samples_per_second=99, stacks="both"))
        sampler.start()
        stack.callback(sampler.close)
        for what in ("new binaries", "the same binaries again"):
            before, statuses, drains = sampler.tables, Counter[int](), []
            assert before is not None
            due, children = time.monotonic(), []
            for path in paths:
                children.append(subprocess.Popen([path]))
                due += 1 / PER_SECOND
                time.sleep(max(0.0, due - time.monotonic()))
                began = time.monotonic()
                samples = sampler.drain()
                drains.append(time.monotonic() - began)
                statuses.update(s.user_status for s in samples if s.comm.startswith(b"program"))
            for child in children:
                child.wait()
            after = sampler.tables
            assert after is not None
            taken = statuses.total()
            cut = taken - statuses[STACK_OK]
            yield Row(
                f"{count} {what}, {PER_SECOND} per second",
                f"{after.loaded - before.loaded} loaded, "
                f"{(after.cpu_ns - before.cpu_ns) / 1e6 / count:.2f} ms CPU per binary, "
                f"{cut / max(1, taken):.0%} of {taken} stacks cut off",
                f"drain: median {statistics.median(drains) * 1e6:.0f} µs, "
                f"longest {max(drains) * 1e3:.1f} ms",
            )


def rows(quick: bool) -> Iterator[Row]:
    """The rows of this topic."""
    for path in filter(os.path.exists, FILES):
        total, copy, size = load(os.path.realpath(path))
        yield Row(
            f"load the tables of {Path(path).name}",
            f"{total:.2f} ms CPU, {size >> 10} KiB",
            f"copy alone {copy:.2f} ms",
            total / copy if copy else None,
            goal="≤ 10 ms",
        )
        if not quick:
            took, entries = index_ms(os.path.realpath(path))
            yield Row(
                f"make the search table of {Path(path).name}",
                f"{took:.0f} ms",
                f"{entries} entries",
            )
    yield from storm(2 if quick else 10)
