"""Start times of processes from ``/proc``, which distinguish reuses of a pid."""

from __future__ import annotations

import os
from typing import Final

from otel_kprofiler.host import HostFiles

TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
"""Resolution of start times in ``/proc``, in nanoseconds."""


def parse_start_ticks(stat: bytes) -> int:
    """Start time of a process in clock ticks since boot, from ``/proc/PID/stat``.

    Field 22 of proc_pid_stat(5); the name in field 2 may contain blanks and parentheses.
    Raises ``ValueError`` on malformed input.
    """
    fields = stat[stat.rindex(b")") + 2 :].split(b" ", 20)
    if len(fields) < 21:
        raise ValueError("too few fields in a stat line")
    return int(fields[19])


def read_start_ticks(files: HostFiles, pid: int | str) -> int | None:
    """Start time of a process in ticks; None if there is no such process."""
    try:
        return parse_start_ticks(files.read_bytes(f"/proc/{pid}/stat"))
    except (OSError, ValueError):
        return None
