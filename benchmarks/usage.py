"""Measures the CPU time of another process."""

import contextlib
import os
import time
from pathlib import Path

_CPUCLOCK_SCHED = 2


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its threads included, as clock_getcpuclockid(3) has it."""
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)


def children_cpu_seconds(pid: int) -> float:
    """User and system time of a process's children that run, and of those that were waited for."""
    # The fields after the name, which may contain spaces (proc(5), /proc/pid/stat).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    used = (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it ended
            for child in (task / "children").read_text().split():
                used += cpu_seconds(int(child))
    return used
