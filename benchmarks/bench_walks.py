"""User stack walks: cost per sample and per frame, compared with the kernel's stack walk."""

import contextlib
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.rows import Row
from otel_kprofiler.bpf import DEFAULT_MAX_WORK
from otel_kprofiler.model import StackEnd
from otel_kprofiler.unwinding import Limits
from tests.truth import costly
from tests.truth.dumps import Dumps, StackDump, build

CHAIN = (
    """
volatile long count;
#define FUNCTION(name, next) __attribute__((noinline)) void name(void) { next(); count++; }
__attribute__((noinline)) void leaf(void) { for (int i = 0; i < 20000; i++) count++; }
"""
    + "".join(
        f"FUNCTION(f{number}, {f'f{number - 1}' if number else 'leaf'})\n" for number in range(40)
    )
    + "int main(void) { for (;;) f39(); }"
)
INTERPRETED = "def f(n):\n return sum(map(f, [n - 1])) + n if n else 0\nwhile True: f(9)"
SHELL = 'f() { [ "$1" -gt 0 ] && f $(($1 - 1)); }; while :; do f 7; done'
HZ = 499


@contextlib.contextmanager
def programs(folder: Path) -> Iterator[dict[str, int]]:
    """Runs the programs during the block, and yields their pids, keyed by description."""
    compiled = str(folder / "chain")
    options = ["-O1", "-fno-omit-frame-pointer", "-x", "c", "-", "-o", compiled]
    subprocess.run(["gcc", *options], input=CHAIN, text=True, check=True)
    commands = {
        "C with frame pointers": [compiled],
        "python3": ["/usr/bin/python3", "-c", INTERPRETED],
        "bash": ["/bin/bash", "-c", SHELL],
    }
    with contextlib.ExitStack() as stack:
        results = {}
        for name, command in commands.items():
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            stack.callback(process.kill)
            results[name] = process.pid
        yield results


def whole(dumper: Dumps, pid: int, count: int) -> list[StackDump]:
    """Returns dumps of complete stacks, taken after the tables were loaded."""
    while any(sample.stack.end is StackEnd.PENDING for sample in dumper.take(pid, HZ, 20)):
        pass
    result = dumper.take(pid, HZ, count)
    return [sample for sample in result if sample.stack.end is StackEnd.COMPLETE]


def cost(
    dumps: Sequence[StackDump],
    time_ns: Callable[[StackDump], int],
    frames: Callable[[StackDump], int],
) -> tuple[float, float, float]:
    """Returns the median time of a walk in µs, the mean number of frames, and the ns per frame."""
    mean = statistics.mean(map(frames, dumps))
    return (
        statistics.median(map(time_ns, dumps)) / 1e3,
        mean,
        statistics.median(time_ns(dump) / max(1, frames(dump)) for dump in dumps),
    )


def forced(folder: Path, built: Path, count: int) -> Iterator[Row]:
    """Measures the longest walks that the work limit allows."""
    limits = Limits(1 << 30, 1 << 28)
    for kind in costly.KINDS:
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
            process = stack.enter_context(subprocess.Popen(costly.build(Path(place), kind)))
            stack.callback(process.kill)
            dumper = stack.enter_context(
                Dumps(built, forgetting=True, max_work=DEFAULT_MAX_WORK, limits=limits)
            )
            while any(x.stack.end is StackEnd.PENDING for x in dumper.take(process.pid, HZ, 50)):
                pass
            dumps = dumper.take(process.pid, HZ, count)
        ended = [dump for dump in dumps if dump.stack.end is StackEnd.WORK_LIMIT]
        us = sorted(one.cold_ns / 1e3 for one in ended)
        unit_ns = statistics.median(one.cold_ns / one.work for one in ended)
        yield Row(
            f"longest walk, {kind}",
            f"median {statistics.median(us):.0f} µs, 99th percentile {us[-len(us) // 100]:.0f} µs,"
            f" longest {us[-1]:.0f} µs",
            f"{len(ended)} of {len(dumps)} end at the limit of work, {unit_ns:.0f} ns per unit",
            statistics.median(us) / 150,
            goal="≤ 150 µs",
        )


def rows(quick: bool) -> Iterator[Row]:
    count = 150 if quick else 1000
    with tempfile.TemporaryDirectory() as name, programs(Path(name)) as running:
        built = build(Path(name))
        with Dumps(built) as warm, Dumps(built, forgetting=True) as cold:
            for program, pid in running.items():
                first, again = whole(cold, pid, count), whole(warm, pid, count)
                walks = (
                    ("nothing cached", first, lambda value: value.cold_ns),
                    ("as samples find it", again, lambda value: value.cold_ns),
                    ("all cached", again, lambda value: value.warm_ns),
                )
                for what, dumps, time_ns in walks:
                    us, frames, per_frame = cost(dumps, time_ns, lambda o: len(o.stack.addresses))
                    kernel_us, pointers, kernel_per_frame = cost(
                        dumps, lambda value: value.pointers_ns, lambda value: value.pointers
                    )
                    yield Row(
                        f"walk of {program}, {what}",
                        f"{us:.1f} µs, {frames:.0f} frames, {per_frame:.0f} ns per frame",
                        f"bpf_get_stack {kernel_us:.1f} µs, {pointers:.0f} frames,"
                        f" {kernel_per_frame:.0f} ns per frame",
                        per_frame / kernel_per_frame,
                    )
        yield from forced(Path(name), built, count)
