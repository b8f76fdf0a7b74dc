"""Measures the CPU time of another process."""

import time

_CPUCLOCK_SCHED = 2


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its threads included, as clock_getcpuclockid(3) has it."""
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
