"""Measures user-stack collection: time in the interrupt, complete stacks, and missed ticks."""

import contextlib
import ctypes
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.bench_agent import mixed_load
from benchmarks.rows import Row
from otel_kprofiler.bpf import bpf_call
from otel_kprofiler.model import STACK_OK, TRUNCATED_STACKS, USER_SIDE
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig

ROUNDS = 4
WARM_UP_S = 3.0
SETTLE_S = 10.0
_ENABLE_STATS = 32  # BPF_ENABLE_STATS; its attribute is BPF_STATS_RUN_TIME, which is 0
_PERF_EVENT = 7  # BPF_PROG_TYPE_PERF_EVENT


class Way(NamedTuple):
    name: str
    settings: dict[str, str]


WAYS = (
    Way("kernel stacks", {"stacks": "kernel"}),
    Way("both, by tables", {"stacks": "both"}),
    Way("both, by frame pointers", {"stacks": "both", "user_unwinding": "frame_pointers"}),
)


class Totals:
    """Total counts across all rounds for one method."""

    def __init__(self) -> None:
        self.taken = self.missed = self.whole = self.cut = self.run_ns = self.runs = 0
        self.seconds = 0.0


@contextlib.contextmanager
def program_times() -> Iterator[None]:
    """Enables the kernel's run-time statistics of BPF programs. Needs CAP_SYS_ADMIN."""
    fd = bpf_call(_ENABLE_STATS, ctypes.c_uint32(0))
    try:
        yield
    finally:
        os.close(fd)


def program_usage() -> tuple[int, int]:
    """Returns the run time (ns) and run count of the perf-event program that ran longest."""
    results = []
    for name in os.listdir("/proc/self/fdinfo"):
        with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{name}", encoding="ascii") as f:
            values = dict(re.findall(r"^(\w+):\s+(\d+)$", f.read(), re.MULTILINE))
            if values.get("prog_type") == str(_PERF_EVENT):
                results.append((int(values["run_time_ns"]), int(values["run_cnt"])))
    return max(results)


def measure(way: Way, rate: int, seconds: float, totals: Totals) -> None:
    """Loads tables in a warm-up, then samples for ``seconds`` and updates ``totals``."""
    sampler = EbpfSampler(SamplerConfig(samples_per_second=rate, **way.settings))  # type: ignore[arg-type]
    sampler.start()
    try:
        drain(sampler, WARM_UP_S)
        before, used = sampler.counts()["on_cpu"], program_usage()
        began = time.monotonic()
        statuses = drain(sampler, seconds)
        after, used_then = sampler.counts()["on_cpu"], program_usage()
        totals.seconds += time.monotonic() - began
        totals.taken += after.taken - before.taken + _empty(after) - _empty(before)
        totals.missed += after.missed - before.missed
        totals.whole += statuses[STACK_OK]
        totals.cut += statuses.total() - statuses[STACK_OK]
        totals.run_ns += used_then[0] - used[0]
        totals.runs += used_then[1] - used[1]
    finally:
        sampler.close()


def _empty(counts) -> int:
    return counts.filtered["empty"]


def drain(sampler: EbpfSampler, seconds: float) -> Counter[int]:
    """Drains a sampler for ``seconds``, and counts the user stacks by status."""
    statuses, until = Counter[int](), time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        sampler.wait(min(left, 0.25))
        collected = (dict(sample.collected) for sample in sampler.drain())
        statuses.update(sides[USER_SIDE] for sides in collected if USER_SIDE in sides)
    return statuses


def cut_off(seconds: float) -> Row:
    """Measures the fraction of user stacks that are truncated despite loaded tables, by cause."""
    sampler = EbpfSampler(SamplerConfig(samples_per_second=99, stacks="both"))
    sampler.start()
    try:
        drain(sampler, SETTLE_S)
        statuses = drain(sampler, seconds)
    finally:
        sampler.close()
    causes = {end.name.lower(): statuses[status] for status, end in TRUNCATED_STACKS.items()}
    result = sorted(causes.items(), key=lambda item: -item[1])
    return Row(
        f"user stacks cut off after {SETTLE_S:.0f} s",
        f"{sum(causes.values()) / max(1, statuses.total()):.2%} of {statuses.total()}",
        ", ".join(f"{name} {count}" for name, count in result if count),
        goal="≤ 2 %",
    )


def rows(quick: bool) -> Iterator[Row]:
    """Measures all methods alternately at two rates, so that other load affects them equally."""
    with mixed_load(1000):
        yield cut_off(10 if quick else 60)
    rounds, seconds = (2, 3.0) if quick else (ROUNDS, 6.0)
    for rate in (99, 999):
        results = [Totals() for _ in WAYS]
        with mixed_load(1000), program_times():
            time.sleep(1)
            for _ in range(rounds):
                for way, totals in zip(WAYS, results, strict=True):
                    measure(way, rate, seconds, totals)
        kernel_us = results[0].run_ns / max(1, results[0].taken) / 1e3
        for way, totals in zip(WAYS, results, strict=True):
            cost_us = totals.run_ns / max(1, totals.taken) / 1e3
            yield Row(
                f"in the interrupt, {rate} Hz, {way.name}",
                f"{cost_us:.1f} µs per busy tick, {totals.run_ns / totals.seconds / 1e9:.2%}"
                " of a core",
                f"kernel stacks {kernel_us:.1f} µs",
                cost_us / kernel_us,
            )
            stacks = totals.whole + totals.cut
            whole = f", {totals.whole / stacks:.1%} of user stacks whole" if stacks else ""
            yield Row(
                f"missed, {rate} Hz, {way.name}",
                f"{totals.missed / max(1, totals.taken + totals.missed):.2%} of busy ticks{whole}",
                f"{totals.missed} of {totals.taken + totals.missed}",
            )
