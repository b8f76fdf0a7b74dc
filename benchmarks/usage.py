"""Measures the CPU time of another process."""

import contextlib
import os
import time
from pathlib import Path

_CPUCLOCK_SCHED = 2


def cpu_seconds(pid: int) -> float:
    """Returns the user plus system time of a process and its threads (clock_getcpuclockid(3))."""
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)


def children_cpu_seconds(pid: int) -> float:
    """Returns the user plus system time used by a process's running and reaped children."""
    # Skip comm, which may contain spaces (/proc/pid/stat in proc(5)).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    used = (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the child has exited
            for child in (task / "children").read_text().split():
                used += cpu_seconds(int(child))
    return used
