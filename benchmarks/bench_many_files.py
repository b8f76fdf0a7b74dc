"""Benchmarks user stacks across many binaries, and in a binary whose tables exceed memory."""

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.bench_unwinding import program_times, program_usage
from benchmarks.rows import Row
from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.model import USER_SIDE, StackEnd, parse_user_stack
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from tests.truth import costly

# A program that works for two milliseconds every two seconds, twenty calls deep.
SELDOM = """
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
volatile long count;
__attribute__((noinline)) void deep(int depth)
{
    if (depth)
        deep(depth - 1);
    else
        for (clock_t end = clock() + CLOCKS_PER_SEC / 500; clock() < end;)
            for (int i = 0; i < 10000; i++)
                count++;
    count++;
}
int main(int arguments, char **argument)
{
    srand(getpid());
    for (;;) {
        deep(20);
        if (arguments == 1)
            usleep(1500000 + rand() % 1000000);
    }
}
"""
HZ = 499


class Found(NamedTuple):
    """Results of a measurement: the outcomes of unwinding, and the BPF time per sample in µs."""

    ends: Counter[StackEnd]
    us: float

    def shares(self) -> str:
        total = max(1, self.ends.total())
        return ", ".join(
            f"{n / total:.1%} {end.name.lower()}" for end, n in self.ends.most_common()
        )


def sample(sampler: EbpfSampler, comm: bytes, seconds: float) -> Found:
    """For the given time, samples programs whose names start with ``comm``."""
    ends, until = Counter[StackEnd](), time.monotonic() + seconds
    used, taken = program_usage()[0], sampler.counts()["on_cpu"].taken
    while (left := until - time.monotonic()) > 0:
        sampler.wait(min(left, 0.25))
        words = (s.words(USER_SIDE) for s in sampler.drain() if s.comm.startswith(comm))
        ends.update(parse_user_stack(word).end for word in words if word)
    ns = program_usage()[0] - used
    return Found(ends, ns / max(1, sampler.counts()["on_cpu"].taken - taken) / 1e3)


@contextlib.contextmanager
def processes(commands: list[list[str]]) -> Iterator[None]:
    running: list[subprocess.Popen[bytes]] = []
    try:
        running += map(subprocess.Popen, commands)
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def open_sampler(**settings: int) -> EbpfSampler:
    sampler = EbpfSampler(
        SamplerConfig(samples_per_second=HZ, stacks="user", **settings)  # type: ignore[arg-type]
    )
    sampler.start()
    return sampler


def thousand(folder: Path, quick: bool) -> Iterator[Row]:
    """Samples one process, then many processes that each run a different binary."""
    count, warm_s, seconds = (200, 6.0, 5.0) if quick else (1000, 20.0, 15.0)
    first = folder / "seldom"
    compiler = ["gcc", "-x", "c", "-O1", "-o", str(first), "-"]
    subprocess.run(compiler, input=SELDOM, text=True, check=True)
    paths = [str(shutil.copy(first, folder / f"seldom-{n}")) for n in range(count)]
    with contextlib.closing(open_sampler()) as sampler:
        with processes([[str(first), "always"]]):
            sample(sampler, b"seldom", 2)
            one = sample(sampler, b"seldom", seconds)
        before = read_resident_bytes()
        with processes([[path] for path in paths]):
            new = sample(sampler, b"seldom", warm_s)
            many = sample(sampler, b"seldom", seconds)
        after, tables = read_resident_bytes(), sampler.tables
    assert tables is not None
    yield Row(f"one process, {HZ} Hz", f"{one.us:.1f} µs per sample, {one.shares()}")
    yield Row(
        f"{count} processes of a binary each, first {warm_s:.0f} s",
        f"{new.us:.1f} µs per sample, {new.shares()}",
        f"{tables.loaded} tables loaded, {tables.cpu_ns / 1e6 / tables.loaded:.2f} ms CPU each",
        new.us / one.us,
    )
    yield Row(
        f"{count} processes of a binary each, then",
        f"{many.us:.1f} µs per sample, {many.shares()}",
        f"one process {one.us:.1f} µs",
        many.us / one.us,
    )
    yield Row(
        f"{count} processes of a binary each, memory",
        f"{after / 1e6:.1f} MB resident, {tables.bytes / 1e6:.1f} MB of tables",
        f"before {before / 1e6:.1f} MB",
        after / before,
    )


def too_small(folder: Path, quick: bool) -> Iterator[Row]:
    """Samples a program with enough memory for all its tables, then for only a fifth of them."""
    command = costly.build(folder, "short entries", files=12, entries=25_000)
    with processes([command]):
        for megabytes in (64, 2):
            with contextlib.closing(open_sampler(max_tables_bytes=megabytes << 20)) as sampler:
                sample(sampler, b"driver", 3)
                then = sample(sampler, b"driver", 4 if quick else 25)
                tables = sampler.tables
            assert tables is not None
            yield Row(
                f"12 tables of 0.9 MB in {megabytes} MB",
                f"{then.us:.0f} µs per sample, {then.shares()}",
                f"{tables.loaded} loaded, {tables.evicted} evicted,"
                f" {sum(tables.refused.values())} refused, {tables.cpu_ns / 1e6:.0f} ms CPU",
            )


def rows(quick: bool) -> Iterator[Row]:
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as other,
        program_times(),
    ):
        yield from thousand(Path(one), quick)
        yield from too_small(Path(other), quick)
