"""Reads the agent's CPU time from all kernel interfaces that report it."""

import os
from typing import NamedTuple

from otel_kprofiler.sampling import EbpfSampler


class CpuTime(NamedTuple):
    """The agent's CPU time since its start, in seconds.

    Attributes:
        children: CPU time of reaped child processes, which read files for the agent.
        programs: CPU time of the sampling BPF program on all CPUs. The program runs in interrupts,
            so the kernel charges this time to the interrupted processes.
    """

    user: float
    system: float
    children: float
    programs: float


def read_cpu_time(sampler: EbpfSampler | None) -> CpuTime:
    """Returns the CPU time used; ``programs`` is updated at each drain. Thread-safe."""
    times = os.times()
    children = times.children_user + times.children_system
    return CpuTime(times.user, times.system, children, sampler.busy_ns / 1e9 if sampler else 0.0)
