"""Measures the cost of tracing every context switch, with and without off-CPU samples."""

import contextlib
import ctypes
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rows import Row
from otel_kprofiler.bpf import bpf_call
from otel_kprofiler.sampling import EbpfSampler, OffCpuConfig, SamplerConfig

STATS = Path("/proc/sys/kernel/bpf_stats_enabled")
TRACEPOINT = Path("/sys/kernel/tracing/events/sched/sched_switch")
PING_PONG = """
import os, sys, time
a, b = os.pipe()
c, d = os.pipe()
if os.fork() == 0:
    os.close(b)
    while os.read(a, 1):
        os.write(d, b"x")
    os._exit(0)
count, end = 0, time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    for _ in range(100):
        os.write(b, b"x")
        os.read(c, 1)
    count += 200
print(count / float(sys.argv[1]))
"""
# mov r0, 0; exit
EMPTY = bytes.fromhex("b7000000000000009500000000000000")
# include/uapi/linux/bpf.h
PROG_LOAD, RAW_TRACEPOINT_OPEN, PROG_TYPE_RAW_TRACEPOINT = 5, 17, 17
SWITCHES = ["stress-ng", "--switch", "0", "--metrics-brief", "-t"]


@contextlib.contextmanager
def following(off_cpu: OffCpuConfig | None) -> Iterator[EbpfSampler | None]:
    """Samples only off-CPU time during the block, and drains the sampler as the agent does."""
    if off_cpu is None:
        yield None
        return
    sampler = EbpfSampler(SamplerConfig(on_cpu=False, stacks="both", off_cpu=off_cpu))
    sampler.start()
    done = threading.Event()

    def drain() -> None:
        while not done.wait(0.25):
            sampler.drain()

    thread = threading.Thread(target=drain)
    thread.start()
    try:
        yield sampler
    finally:
        done.set()
        thread.join()
        sampler.close()


@contextlib.contextmanager
def empty_program() -> Iterator[None]:
    """Attaches an empty program to context switches, to measure the minimum cost of any program."""
    code, licence = ctypes.create_string_buffer(EMPTY), ctypes.create_string_buffer(b"GPL")
    attributes = (ctypes.c_uint64 * 3)(
        PROG_TYPE_RAW_TRACEPOINT | len(EMPTY) // 8 << 32,
        ctypes.addressof(code),
        ctypes.addressof(licence),
    )
    program = bpf_call(PROG_LOAD, attributes)
    try:
        text = ctypes.create_string_buffer(b"sched_switch")
        attached = (ctypes.c_uint64 * 2)(ctypes.addressof(text), program)
        link = bpf_call(RAW_TRACEPOINT_OPEN, attached)
        try:
            yield
        finally:
            os.close(link)
    finally:
        os.close(program)


@contextlib.contextmanager
def perf_record() -> Iterator[None]:
    """Runs ``perf record`` on context switches, with kernel stacks. Needs tracefs."""
    command = ["perf", "record", "-q", "-e", "sched:sched_switch", "-a", "-g", "-o", "/dev/null"]
    perf = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        perf.send_signal(signal.SIGINT)
        perf.wait()


def ping_pong(seconds: float) -> float:
    """Returns the context switches per second of two processes that exchange a byte on one CPU."""
    pin = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    command = [*pin, sys.executable, "-S", "-c", PING_PONG, str(seconds)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def stress(seconds: float) -> float:
    """Returns the number of context switches per second while stress-ng runs on all CPUs."""
    command = [*SWITCHES, str(max(1, round(seconds)))]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(x for x in (result.stdout + result.stderr).splitlines() if "switch  " in x)
    return float(line.split("switch")[1].split()[4])


def run_ns(off_cpu: OffCpuConfig, seconds: float) -> float:
    """Returns the program's mean run time per switch, in ns, from the kernel's statistics."""
    before = STATS.read_text()
    STATS.write_text("1")
    try:
        with following(off_cpu):
            ping_pong(seconds)
            results = []
            for fd in Path("/proc/self/fdinfo").iterdir():
                with contextlib.suppress(OSError):
                    lines = [x.split(":\t", 1) for x in fd.read_text().splitlines() if ":\t" in x]
                    facts = dict(lines)
                    results.append((int(facts.get("run_cnt", 0)), int(facts.get("run_time_ns", 0))))
    finally:
        STATS.write_text(before)
    runs, run_time_ns = max(results)  # the sched_switch program has the most runs
    return run_time_ns / runs


def rows(quick: bool) -> Iterator[Row]:
    rounds, seconds, settling = (3, 1.0, 3.0) if quick else (9, 3.0, 6.0)
    settings = {
        "totals alone": (OffCpuConfig(samples_per_second=0), "≥ 0.97x"),
        "samples at the default rate": (OffCpuConfig(), "≥ 0.95x"),
    }
    for name, (off_cpu, _) in settings.items():
        if os.access(STATS, os.W_OK):
            yield Row(f"off-CPU, {name}: a switch", f"{run_ns(off_cpu, seconds):.0f} ns")
    loads = {"pipe ping-pong": ping_pong}
    if shutil.which("stress-ng"):
        loads["stress-ng switch"] = stress
    has_perf = bool(shutil.which("perf")) and TRACEPOINT.exists()
    for load, measure in loads.items():
        plain, empty, perf = [], [], []
        ratios: dict[str, list[float]] = {name: [] for name in settings}
        for _ in range(rounds):
            plain.append(measure(seconds))
            with empty_program():
                empty.append(measure(seconds) / plain[-1])
            if has_perf:
                with perf_record():
                    perf.append(measure(seconds) / plain[-1])
            for name, (off_cpu, _) in settings.items():
                with following(off_cpu):
                    if off_cpu.samples_per_second:
                        measure(settling)  # until the adaptive rate has settled
                    ratios[name].append(measure(seconds) / plain[-1])
        floor, without = statistics.median(empty), statistics.median(plain)
        yield Row(f"empty program: {load}", f"{floor * without:.0f} switches/s",
                  f"without {without:.0f}", floor)  # fmt: skip
        if perf:
            ratio = statistics.median(perf)
            yield Row(f"perf record -e sched:sched_switch -g: {load}",
                      f"{ratio * without:.0f} switches/s", f"without {without:.0f}",
                      ratio)  # fmt: skip
        for name, (_, goal) in settings.items():
            ratio = statistics.median(ratios[name])
            yield Row(
                f"off-CPU, {name}: {load}",
                f"{ratio * without:.0f} switches/s",
                f"without {without:.0f}, with an empty program {floor * without:.0f}",
                ratio,
                goal,
            )
