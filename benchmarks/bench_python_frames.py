"""CPython frames: the cost of reading them in the interrupt, and the size of code descriptions."""

import contextlib
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import NamedTuple

from benchmarks.bench_unwinding import program_times, program_usage
from benchmarks.rows import Row
from otel_kprofiler.interpreters import open_own
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig

DEPTHS = (10, 30, 100)
TYPICAL_DEPTH = 30
LIMIT = 127
FAST_HZ, USUAL_HZ = 1999, 99
ROUNDS = 4
_READ_BYTES = 1 << 18
_RING_HEADER, _DESCRIPTION_BYTES, _PIECE_HEADER, _PIECE_BYTES = 8, 56, 16, 4096


class Cost(NamedTuple):
    """The run time and sample count of the BPF program during a measurement."""

    run_ns: int
    taken: int
    with_frames: int
    seconds: float


def work(depth: int, going: threading.Event) -> None:
    """Recurses ``depth`` times, then works in the kernel until the event is set."""
    if depth:
        work(depth - 1, going)
        return
    with open("/dev/zero", "rb", buffering=0) as zero:
        while not going.is_set():
            os.pread(zero.fileno(), _READ_BYTES, 0)


@contextlib.contextmanager
def working(depth: int, cpu: int) -> Iterator[None]:
    """Runs a thread pinned to one CPU, mostly in the kernel and ``depth`` Python calls deep."""
    stop = threading.Event()

    def pinned() -> None:
        os.sched_setaffinity(0, (cpu,))
        work(depth - 4, stop)  # the stack also contains three Thread methods and this function

    thread = threading.Thread(target=pinned)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure(rate: int, limit: int, cpu: int, seconds: float) -> Cost:
    """Samples this process on one CPU, after its code objects have been described."""
    own = open_own()
    config = SamplerConfig(
        samples_per_second=rate,
        python_frames=limit,
        target_pids=(os.getpid(),),
        pin_cpu_ids=(cpu,),
    )
    sampler = EbpfSampler(config)
    sampler.start()
    try:
        if sampler.python is not None:
            sampler.python.register(os.getpid(), own.interpreter.layout, own.process)
        _drain(sampler, 0.5)
        before, (used, _), began = sampler.counts()["on_cpu"], program_usage(), time.monotonic()
        known = _read(sampler)
        _drain(sampler, seconds)
        after, (used_then, _) = sampler.counts()["on_cpu"], program_usage()
        return Cost(
            used_then - used,
            after.taken - before.taken,
            _read(sampler) - known,
            time.monotonic() - began,
        )
    finally:
        sampler.close()


def _read(sampler: EbpfSampler) -> int:
    counts = sampler.python.counts() if sampler.python is not None else {}
    return counts.get("complete", 0) + counts.get("truncated", 0)


def _drain(sampler: EbpfSampler, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.25))
        sampler.drain()


def total(costs: list[Cost]) -> Cost:
    return Cost(*(sum(values) for values in zip(*costs, strict=True)))


def paired(depth: int, rate: int, seconds: float) -> tuple[Cost, Cost]:
    """Measures the cost without and with Python frames, in alternating runs."""
    cpu = max(os.sched_getaffinity(0))
    results: dict[int, list[Cost]] = {0: [], LIMIT: []}
    with working(depth, cpu):
        for _ in range(ROUNDS):
            for limit, costs in results.items():
                costs.append(measure(rate, limit, cpu, seconds / ROUNDS))
    return total(results[0]), total(results[LIMIT])


def code_objects() -> list[CodeType]:
    functions = (one for one in gc.get_objects() if isinstance(one, FunctionType))
    return list({function.__code__ for function in functions})


def description_bytes(code: CodeType) -> int:
    """Returns the size of a code object's description in the ring, assuming ASCII names."""
    size = _DESCRIPTION_BYTES + len(code.co_filename) + len(code.co_qualname)
    pieces = -(-len(code.co_linetable) // _PIECE_BYTES)
    heads = (1 + pieces) * _RING_HEADER + pieces * _PIECE_HEADER
    return heads + size + len(code.co_linetable)


def rows(quick: bool) -> Iterator[Row]:
    seconds = 4 if quick else 16
    version = ".".join(map(str, sys.version_info[:2]))
    with program_times():
        for depth in DEPTHS:
            without, with_frames = paired(depth, FAST_HZ, seconds)
            before, after = (cost.run_ns / max(1, cost.taken) for cost in (without, with_frames))
            read = with_frames.with_frames / max(1, with_frames.taken)
            yield Row(
                f"Python {version}, {depth} frames, {FAST_HZ} Hz",
                f"{(after - before) / 1e3:.1f} µs more per sample",
                f"{after / 1e3:.1f} instead of {before / 1e3:.1f} µs; {read:.1%} with frames",
                after / before,
            )
        without, with_frames = paired(TYPICAL_DEPTH, USUAL_HZ, 2 * seconds)
        share, base = (cost.run_ns / cost.seconds / 1e9 for cost in (with_frames, without))
        yield Row(
            f"program at {USUAL_HZ} Hz on a busy CPU, {TYPICAL_DEPTH} frames",
            f"{share:.2%} of a core",
            f"{base:.2%} without Python frames",
            share / base,
            goal="≤ 1 %",
        )
    sizes = sorted(map(description_bytes, code_objects()))
    yield Row(
        f"description of a code object ({len(sizes)} of this process)",
        f"median {statistics.median(sizes):.0f} bytes, "
        f"99th percentile {sizes[len(sizes) * 99 // 100]}",
        f"mean {statistics.mean(sizes):.0f}",
    )
