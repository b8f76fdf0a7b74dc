"""Measures the CPU time of child processes, and limits it based on their input size."""

import math
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from otel_kprofiler.host.child import limit_resources

_MIB: Final = 1 << 20
_PROCESS_CLOCK: Final = 2
"""Type bits of a process's CPU clock id (``CPUCLOCK_SCHED``, include/linux/posix-timers.h)."""
_FIRST_PAUSE_S: Final = 0.0005
_LAST_PAUSE_S: Final = 0.05
"""First and longest pause, in seconds, between two checks of a child, as in ``Popen.wait``."""


class CpuGrant(NamedTuple):
    """CPU time granted to a child for ``input_bytes`` of input; ``seconds`` is at least 1."""

    seconds: int
    input_bytes: int

    def describe(self) -> str:
        """Describes how a child exceeded the limit: "took more than 5 s of CPU for 3 MiB"."""
        size = -(-self.input_bytes // _MIB)
        return f"took more than {self.seconds} s of CPU for {size} MiB"


class CpuRate(NamedTuple):
    """A CPU time limit that grows with the size of the input.

    Attributes:
        least_s: limit for an empty input.
        most_s: upper bound on the limit, in seconds, because a file may declare a wrong size.
    """

    least_s: float
    per_mib_s: float
    most_s: int

    def grant(self, input_bytes: int) -> CpuGrant:
        """Returns the CPU time granted for input of the given size."""
        seconds = min(self.most_s, self.least_s + self.per_mib_s * input_bytes / _MIB)
        return CpuGrant(max(1, math.ceil(seconds)), input_bytes)


def limit_cpu(pid: int, grant: CpuGrant, earlier_s: float = 0.0) -> None:
    """Limit a child's CPU time. At the limit, SIGXCPU kills the child without a core dump.

    ``earlier_s`` is the CPU time in seconds that the child has spent on other files.
    """
    with suppress(OSError):  # the child has exited
        limit_resources({resource.RLIMIT_CPU: grant.seconds + math.ceil(earlier_s)}, pid)


def has_exceeded_cpu(status: int) -> bool:
    """Returns whether a child with this return code was killed by its CPU time limit."""
    return status == -signal.SIGXCPU


class MeteredChild(subprocess.Popen[bytes]):
    """A child process whose CPU time is read before it is reaped.

    The child has its own process group, so that Ctrl-C at a terminal does not end its work. The
    parent still needs the results to finish a recording.

    Attributes:
        cpu_ns: CPU time of all the child's threads, set when the child exits or is abandoned.
        serves_files: whether the child can read several files, one after another.
        is_idle: whether the child has finished its work and can accept more.
        has_status: whether ``returncode`` is reliable. ``returncode`` may be 0 for a failed child
            if other code reaped it, or if this process ignores SIGCHLD.
    """

    cpu_ns = 0
    serves_files = False
    is_idle = False
    has_status = False

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        super().__init__(command, process_group=0, **options)

    @property
    def earlier_cpu_s(self) -> float:
        """Returns the CPU time that the child has spent on earlier files, in seconds."""
        return 0.0

    def begin(self) -> None:
        """Start working within the configured limits."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the child to exit, as ``Popen.wait`` does; ``communicate`` calls this method."""
        if self.returncode is None:
            try:
                if not self._has_ended(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                self.has_status = True
                self.cpu_ns = self._read_clock()
            except OSError:
                # Another thread has reaped the child, or the kernel did because SIGCHLD is ignored.
                return super().wait(timeout)
        return super().wait()

    def read_cpu_time(self) -> None:
        """Read the child's CPU time without waiting for the child to exit."""
        if self.returncode is None:
            with suppress(OSError):  # another thread has reaped the child
                self.cpu_ns = self._read_clock()

    def _read_clock(self) -> int:
        return time.clock_gettime_ns((~self.pid << 3) | _PROCESS_CLOCK)

    def _has_ended(self, timeout: float | None) -> bool:
        """Poll until the child has exited, without reaping it (Python may lack ``pidfd_open``)."""
        flags = os.WEXITED | os.WNOWAIT
        if timeout is None:
            return os.waitid(os.P_PID, self.pid, flags) is not None
        until = time.monotonic() + timeout
        pause_s = _FIRST_PAUSE_S
        while os.waitid(os.P_PID, self.pid, flags | os.WNOHANG) is None:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return True


class _Waited(threading.local):
    cpu_ns = 0


_waited: Final = _Waited()


def charge_child(child: MeteredChild) -> None:
    """Add a child's CPU time to the calling thread's :func:`children_time_ns`."""
    _waited.cpu_ns += child.cpu_ns


def children_time_ns() -> int:
    """Returns the CPU time, in nanoseconds, of children that the calling thread has waited for."""
    return _waited.cpu_ns
