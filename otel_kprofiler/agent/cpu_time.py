"""CPU time of the agent, wherever the kernel accounts for it."""

from __future__ import annotations

import os
from typing import NamedTuple

from otel_kprofiler.sampling import EbpfSampler


class CpuTime(NamedTuple):
    """CPU seconds since the start.

    Attributes:
        user: of the agent's process, outside the kernel.
        system: the same in the kernel.
        children: of processes that read files for it and have ended.
        programs: of the BPF program that takes samples, in the interrupts of all CPUs. The kernel
            accounts for it as time of the processes that were interrupted.
    """

    user: float
    system: float
    children: float
    programs: float


def read_cpu_time(sampler: EbpfSampler | None) -> CpuTime:
    """The CPU time so far, that of the program as of the sampler's last drain. Thread-safe."""
    times = os.times()
    children = times.children_user + times.children_system
    return CpuTime(times.user, times.system, children, sampler.busy_ns / 1e9 if sampler else 0.0)
