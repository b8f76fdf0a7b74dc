"""Parses ``/proc/PID/stat``, including the start time, which distinguishes reused pids."""

import os
from typing import Final, NamedTuple

from otel_kprofiler.host.access import HostFiles

TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
"""Resolution of start times in ``/proc``, in nanoseconds."""
_PF_KTHREAD: Final = 0x00200000  # include/linux/sched.h


class ProcessStat(NamedTuple):
    """A process as described by ``/proc/PID/stat``.

    Attributes:
        has_ended: whether the main thread has exited; other threads may still be running.
        start_ticks: start time in clock ticks since boot.
        name: name of the main thread (``comm``).
        stack_start: start address of the main thread's stack, which changes when the process
            executes another program; 0 without permission to trace the process (ptrace(2)).
        cpu_ticks: CPU time of all threads in user and kernel mode, in clock ticks.
        mapped_bytes: size of the virtual memory.
    """

    parent: int
    has_ended: bool
    start_ticks: int
    is_kernel_thread: bool = False
    name: bytes = b""
    stack_start: int = 0
    cpu_ticks: int = 0
    mapped_bytes: int = 0


def parse_stat(stat: bytes) -> ProcessStat:
    """Parses ``/proc/PID/stat`` (proc_pid_stat(5)). Raises ``ValueError`` on malformed input."""
    end = stat.rindex(b")")  # the name may contain blanks and parentheses
    fields = stat[end + 2 :].split(b" ", 26)
    if len(fields) < 21:
        raise ValueError("too few fields in a stat line")
    return ProcessStat(
        int(fields[1]),
        fields[0] in (b"Z", b"X"),
        int(fields[19]),
        bool(int(fields[6]) & _PF_KTHREAD),
        stat[stat.find(b"(") + 1 : end],
        int(fields[25]) if len(fields) > 25 else 0,
        int(fields[11]) + int(fields[12]),
        int(fields[20]),
    )


def read_stat(files: HostFiles, pid: int | str) -> ProcessStat | None:
    """Read the status of a process; None if the process does not exist."""
    try:
        return parse_stat(files.read_bytes(f"/proc/{pid}/stat"))
    except (OSError, ValueError):
        return None


def read_owner(files: HostFiles, pid: int) -> int | None:
    """Read the effective user id of a process; None if there is no such process.

    ``/proc/PID`` belongs to the process's user, although the files in it belong to root if the
    process is not dumpable (task_dump_owner() in fs/proc/base.c).
    """
    try:
        fd = files.open_fd(f"/proc/{pid}")
    except OSError:
        return None
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)


def read_start_ticks(files: HostFiles, pid: int | str) -> int | None:
    """Read the start time of a process in ticks; None if there is no such process."""
    stat = read_stat(files, pid)
    return stat.start_ticks if stat else None
