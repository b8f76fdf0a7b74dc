"""Off-CPU time is measured exactly, and waits are sampled, on this kernel."""

import bisect
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from guest.kernel_files import sysctl
from guest.nobody import as_nobody
from guest.sampled import drain_for, sampler

from otel_kprofiler.model import KERNEL_SIDE, WaitCause, WaitState, find_cause
from otel_kprofiler.sampling import OffCpuConfig

pytestmark = pytest.mark.kernel

SLEEPS = "import time\nwhile True: time.sleep(0.05)"
SECONDS = 5


def time_on_cpu(pid):
    """Returns a process's CPU time in nanoseconds, as counted by the scheduler."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def observe(pid):
    """Returns a process's elapsed time, CPU time, exact wait totals, and wait stacks."""
    with sampler(off_cpu=OffCpuConfig(samples_per_second=1000)) as running:
        drain_for(running, 1)
        running.read_waits()
        began, before = time.monotonic_ns(), time_on_cpu(pid)
        samples = drain_for(running, SECONDS)
        totals = {process.tgid: result for process, result in running.read_waits().items()}[pid]
        passed, ran = time.monotonic_ns() - began, time_on_cpu(pid) - before
    waits = [
        (sample.wait.state, list(side.addresses()))
        for sample in samples
        if sample.tgid == pid
        for side in sample.sides
        if side.kind is KERNEL_SIDE
    ]
    return passed, ran, totals, waits


def read_symbols():
    lines = map(str.split, Path("/proc/kallsyms").read_text().splitlines())
    return sorted((int(word[0], 16), word[2]) for word in lines if word[1] in "tTwW")


def test_waits_are_counted_exactly_and_sampled_without_root():
    """With CAP_BPF and CAP_PERFMON, off-CPU time is exact, and each wait has a stack and cause."""
    # Before Linux 5.11, maps count as locked memory.
    resource.setrlimit(resource.RLIMIT_MEMLOCK, [resource.RLIM_INFINITY] * 2)
    command = [sys.executable, "-S", "-c", SLEEPS]
    with subprocess.Popen(command) as process, sysctl("kernel.perf_event_paranoid", 2):
        try:
            time.sleep(1)
            capabilities = ("CAP_BPF", "CAP_PERFMON")
            passed, ran, totals, waits = as_nobody(capabilities, lambda: observe(process.pid))
        finally:
            process.kill()
    # The clock and the totals are read one after the other, so they differ slightly.
    assert totals.total_ns == pytest.approx(passed - ran, rel=0.05, abs=50_000_000)
    assert totals.by_state[WaitState.INTERRUPTIBLE] > totals.total_ns / 2
    assert len(waits) > 10
    symbols = read_symbols()
    for state, addresses in waits:
        if state is WaitState.RUNNABLE:
            continue
        names = [symbols[bisect.bisect(symbols, (address, "~")) - 1][1] for address in addresses]
        assert find_cause(state, names) is WaitCause.SLEEP, names
        at = names.index(
            "__schedule"
        )  # the preceding functions are called by __schedule to trace the switch
        assert names[at : at + 2] == ["__schedule", "schedule"], names
