"""Sampling: time to the first sample, loss at high rates, and cost of draining."""

import contextlib
import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.rows import Row
from otel_kprofiler.bpf import parse_records, record_spans
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig

LOAD = "while True: open('/proc/stat').read()"


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keeps all CPUs busy during the block, half of the time in the kernel."""
    load = [
        subprocess.Popen([sys.executable, "-S", "-c", LOAD]) for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for process in load:
            process.kill()
            process.wait()


def first_sample_s() -> tuple[float, float]:
    """Returns the seconds until ``start`` returns and until the first drained sample, at 99 Hz."""
    started = time.monotonic()
    sampler = EbpfSampler(SamplerConfig(samples_per_second=99, stacks="both"))
    sampler.start()
    loaded = time.monotonic() - started
    while not sampler.drain():
        sampler.wait(0.002)
    first = time.monotonic() - started
    sampler.close()
    return loaded, first


def drained(rate: int, seconds: float) -> tuple[int, int, float, float]:
    """Returns samples taken and lost, CPU seconds used by ``drain``, and bytes per sample."""
    sampler = EbpfSampler(SamplerConfig(samples_per_second=rate, stacks="both"))
    sampler.start()
    cpu, size, end = 0.0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        sampler.wait(0.25)
        before = time.thread_time()
        samples = sampler.drain()
        cpu += time.thread_time() - before
        size += sum(104 + sum(len(side.words) for side in s.sides) for s in samples)
    sampler.stop()
    sampler.drain()
    counts = sampler.counts()["on_cpu"]
    sampler.close()
    return counts.taken, sum(counts.lost.values()), cpu, size / max(1, counts.received)


def decoding_us() -> tuple[float, float]:
    """Returns µs per record for a bare walk over the records, and for ``parse_records``."""
    record = struct.pack(
        "<QQQQQQQIIHHhhh6x16s", 1, 2, 3, 0, 0, 0, 1, 4, 5, 0, 1, 96, 160, -32768, b"comm"
    )
    record += bytes(256)
    data = (struct.pack("<II", len(record), 0) + record) * 5000
    walks, parses = [], []
    for _ in range(5):
        started = time.perf_counter()
        for _span in record_spans(data):
            pass
        walked = time.perf_counter()
        parse_records(data)
        walks.append(walked - started)
        parses.append(time.perf_counter() - walked)
    return min(walks) / 5000 * 1e6, min(parses) / 5000 * 1e6


def rows(quick: bool) -> Iterator[Row]:
    with busy():
        time.sleep(0.1)
        tries = [first_sample_s() for _ in range(3 if quick else 10)]
        loaded, first = (statistics.median(values) * 1000 for values in zip(*tries, strict=True))
        yield Row("sampler start", f"{loaded:.0f} ms")
        yield Row("start to first sample, 99 Hz", f"{first:.0f} ms", goal="≤ 300 ms")
        for rate in (99, 4999):
            taken, lost, cpu, size = drained(rate, 2 if quick else 8)
            yield Row(
                f"drain at {rate} Hz x {os.cpu_count()} CPUs, both stacks",
                f"{cpu / max(1, taken) * 1e6:.2f} µs per sample, {size:.0f} bytes, {lost} lost",
                f"{taken} taken",
                goal="≤ 2 µs, 0 lost",
            )
    walk, parse = decoding_us()
    yield Row("decode a record", f"{parse:.2f} µs", f"bare walk {walk:.2f} µs", parse / walk)
