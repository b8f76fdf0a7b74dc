"""Off-CPU time: what following every context switch costs, with totals alone and with samples."""

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rows import Row
from otel_kprofiler.sampling import EbpfSampler, OffCpuConfig, SamplerConfig

STATS = Path("/proc/sys/kernel/bpf_stats_enabled")
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
SWITCHES = ["stress-ng", "--switch", "0", "--metrics-brief", "-t"]


@contextlib.contextmanager
def following(off_cpu: OffCpuConfig | None) -> Iterator[EbpfSampler | None]:
    """Nothing but off-CPU time is sampled, and drained as in the agent."""
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


def ping_pong(seconds: float) -> float:
    """Context switches a second of two processes that pass a byte through pipes, on one CPU."""
    pin = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    command = [*pin, sys.executable, "-S", "-c", PING_PONG, str(seconds)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def stress(seconds: float) -> float:
    """Context switches a second of stress-ng on all CPUs."""
    command = [*SWITCHES, str(max(1, round(seconds)))]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(x for x in (told.stdout + told.stderr).splitlines() if "switch  " in x)
    return float(line.split("switch")[1].split()[4])


def run_ns(off_cpu: OffCpuConfig, seconds: float) -> tuple[float, float]:
    """Nanoseconds of a run at a switch and at a wake-up, by the kernel's statistics."""
    before = STATS.read_text()
    STATS.write_text("1")
    try:
        with following(off_cpu):
            ping_pong(seconds)
            found = {}
            for fd in Path("/proc/self/fdinfo").iterdir():
                with contextlib.suppress(OSError):
                    lines = [x.split(":\t", 1) for x in fd.read_text().splitlines() if ":\t" in x]
                    facts = dict(lines)
                    if facts.get("run_cnt", "0") != "0":
                        found[int(facts["run_cnt"])] = int(facts["run_time_ns"])
    finally:
        STATS.write_text(before)
    # There are fewer wake-ups than switches.
    waking, switch = min(found), max(found)
    return found[switch] / switch, found[waking] / waking


def rows(quick: bool) -> Iterator[Row]:
    """The rows of this topic."""
    rounds, seconds = (3, 1.0) if quick else (9, 3.0)
    settings = {
        "totals alone": (OffCpuConfig(samples_per_second=0), "≥ 0.97x"),
        "samples at the default rate": (OffCpuConfig(), "≥ 0.95x"),
    }
    for name, (off_cpu, _) in settings.items():
        if os.access(STATS, os.W_OK):
            switch, waking = run_ns(off_cpu, seconds)
            yield Row(
                f"off-CPU, {name}: a switch", f"{switch:.0f} ns", f"and a wake-up {waking:.0f} ns"
            )
    loads = {"pipe ping-pong": ping_pong}
    if shutil.which("stress-ng"):
        loads["stress-ng switch"] = stress
    for load, measure in loads.items():
        for name, (off_cpu, goal) in settings.items():
            ratios, plain = [], []
            for _ in range(rounds):
                without = measure(seconds)
                with following(off_cpu):
                    ratios.append(measure(seconds) / without)
                plain.append(without)
            yield Row(
                f"off-CPU, {name}: {load}",
                f"{statistics.median(ratios) * statistics.median(plain):.0f} switches/s",
                f"without {statistics.median(plain):.0f}",
                statistics.median(ratios),
                goal,
            )
