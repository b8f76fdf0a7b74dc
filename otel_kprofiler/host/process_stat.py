"""What ``/proc/PID/stat`` says of a process; its start time distinguishes reuses of a pid."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from otel_kprofiler.host.access import HostFiles

TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
"""Resolution of start times in ``/proc``, in nanoseconds."""


class ProcessStat(NamedTuple):
    """A process, from ``/proc/PID/stat``.

    Attributes:
        parent: pid of the parent.
        has_ended: whether its main thread has; others may be left.
        start_ticks: start time in clock ticks since boot.
    """

    parent: int
    has_ended: bool
    start_ticks: int


def parse_stat(stat: bytes) -> ProcessStat:
    """Fields 3, 4 and 22 of proc_pid_stat(5); the name in field 2 may contain blanks and ) too.

    Raises ``ValueError`` on malformed input.
    """
    fields = stat[stat.rindex(b")") + 2 :].split(b" ", 20)
    if len(fields) < 21:
        raise ValueError("too few fields in a stat line")
    return ProcessStat(int(fields[1]), fields[0] in (b"Z", b"X"), int(fields[19]))


def read_start_ticks(files: HostFiles, pid: int | str) -> int | None:
    """Start time of a process in ticks; None if there is no such process."""
    try:
        return parse_stat(files.read_bytes(f"/proc/{pid}/stat")).start_ticks
    except (OSError, ValueError):
        return None
