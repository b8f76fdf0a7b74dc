"""Measures the cost of unwind tables, per file and for many new binaries in quick succession."""

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
from typing import NamedTuple

from benchmarks.rows import Row
from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.bpf import PAGE_BYTES, create_inner_map
from otel_kprofiler.elf import FileSource, find_section, read_elf
from otel_kprofiler.host import FileRequest, modification_time
from otel_kprofiler.model import USER_SIDE, FileKey, StackEnd, parse_user_stack
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from otel_kprofiler.unwinding import TableStore
from otel_kprofiler.unwinding.image import image_pages, write_image
from otel_kprofiler.unwinding.indexing import Children, index_frames
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
    """Returns the CPU time for loading tables and for copying them, in ms, and their size."""
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


def mapping_of(path: str) -> tuple[int, int]:
    """Returns the start and end of this process's executable mapping of a file."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        line = next(line for line in maps if line.rstrip().endswith(path) and "r-xs" in line)
    start, end = line.split()[0].split("-")
    return int(start, 16), int(end, 16)


class Ready(NamedTuple):
    """The seconds needed to load a file's tables, and the resident bytes before and after."""

    seconds: float
    before: int
    after: int


def ready(path: str, store: TableStore) -> Ready:
    """Requests a new file's tables five times, as the BPF program does; returns the median."""
    found = []
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        device = os.major(status.st_dev) << 20 | os.minor(status.st_dev)
        with mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC):
            start, end = mapping_of(path)
            for version in range(5):
                key = FileKey(status.st_ino, device, version)
                loaded, before = store.counts().loaded, read_resident_bytes()
                began = time.monotonic()
                store.request(
                    FileRequest(
                        key,
                        start,
                        end,
                        0,
                        os.getpid(),
                        os.getpid(),
                        status.st_size,
                        modification_time(status.st_mtime_ns),
                    )
                )
                while (counts := store.counts()).pending:
                    time.sleep(0.0002)
                assert counts.loaded == loaded + 1, counts
                found.append(Ready(time.monotonic() - began, before, read_resident_bytes()))
    return sorted(found)[len(found) // 2]


def index_ms(path: str) -> tuple[float, int]:
    with open(path, "rb") as file:
        source = FileSource(file.fileno(), os.fstat(file.fileno()).st_size)
        frames = find_section(source, read_elf(source), b".eh_frame")
        began = time.monotonic()
        tables = index_frames(file.fileno(), frames, children=Children())
        return (time.monotonic() - began) * 1e3, tables.entries


def storm(seconds: float) -> Iterator[Row]:
    """Runs 50 new binaries per second while all CPUs are sampled, and then runs them again."""
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
            before, ends, drains = sampler.tables, Counter[StackEnd](), []
            assert before is not None
            due, children = time.monotonic(), []
            for path in paths:
                children.append(subprocess.Popen([path]))
                due += 1 / PER_SECOND
                time.sleep(max(0.0, due - time.monotonic()))
                began = time.monotonic()
                samples = sampler.drain()
                drains.append(time.monotonic() - began)
                stacks = (s.words(USER_SIDE) for s in samples if s.comm.startswith(b"program"))
                ends.update(parse_user_stack(words).end for words in stacks if words)
            for child in children:
                child.wait()
            after = sampler.tables
            assert after is not None
            taken = max(1, ends.total())
            cut = taken - ends[StackEnd.COMPLETE] - ends[StackEnd.PENDING]
            yield Row(
                f"{count} {what}, {PER_SECOND} per second",
                f"{after.loaded - before.loaded} loaded, "
                f"{(after.cpu_ns - before.cpu_ns) / 1e6 / count:.2f} ms CPU per binary, "
                f"of {taken} stacks {ends[StackEnd.PENDING] / taken:.0%} pending, "
                f"{cut / taken:.0%} otherwise cut off",
                f"drain: median {statistics.median(drains) * 1e6:.0f} µs, "
                f"longest {max(drains) * 1e3:.1f} ms",
            )


def files(quick: bool) -> Iterator[Row]:
    """Measures several files separately, and yields the rows for each file."""
    with contextlib.ExitStack() as stack:
        config = SamplerConfig(stacks="user", target_pids=(1,), max_tables_bytes=1 << 30)
        sampler = EbpfSampler(config)
        sampler.start()
        stack.callback(sampler.close)
        store = sampler._attachment().tables
        assert store is not None
        for path in map(os.path.realpath, filter(os.path.exists, FILES)):
            name = Path(path).name
            total, copy, size = load(path)
            yield Row(
                f"load the tables of {name}",
                f"{total:.2f} ms CPU, {size >> 10} KiB",
                f"copy alone {copy:.2f} ms",
                total / copy if copy else None,
                goal="≤ 10 ms",
            )
            seconds, before, after = ready(path, store)
            yield Row(
                f"until the program has the tables of {name}",
                f"{seconds * 1e3:.0f} ms",
                f"resident memory {before / 1e6:.1f} MB, then {after / 1e6:.1f} MB",
                after / before,
            )
            if not quick:
                took, entries = index_ms(path)
                yield Row(
                    f"make the search table of {name}", f"{took:.0f} ms", f"{entries} entries"
                )


def rows(quick: bool) -> Iterator[Row]:
    yield from files(quick)
    yield from storm(2 if quick else 10)
