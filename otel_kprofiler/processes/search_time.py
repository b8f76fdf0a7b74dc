"""Limits the duration of a search, excluding the time spent waiting for a CPU."""

import time
from collections.abc import Callable
from typing import Final

_MAX_BYTES: Final = 128
"""Maximum number of bytes in ``schedstat``: three numbers with up to 20 digits."""


class SearchTime:
    """Limits the time that a thread spends on a search. Used only by the searching thread.

    Time during which the thread waits for a CPU is not counted. Under a low ``cpu.max``, a thread
    waits most of the time, so a limit on elapsed time would end every search.

    Args:
        cpu_s: the CPU time limit, in seconds.
        blocked_s: the limit, in seconds, on the time that the thread is blocked, for example while
            it reads memory backed by a slow file system.
        read_delay_s: returns the time that the thread has waited for a CPU, in seconds.
    """

    def __init__(
        self,
        cpu_s: float,
        blocked_s: float,
        *,
        now_s: Callable[[], float] = time.monotonic,
        cpu_clock_s: Callable[[], float] = time.thread_time,
        read_delay_s: Callable[[], float] | None = None,
    ) -> None:
        self._now_s, self._cpu_clock_s = now_s, cpu_clock_s
        self._read_delay_s = read_delay_s or read_run_delay_s
        self._delay_s = self._read_delay_s()
        self._until_s = now_s() + blocked_s
        self._cpu_until_s = cpu_clock_s() + cpu_s

    def is_over(self) -> bool:
        """Returns whether a limit is exceeded."""
        if self._cpu_clock_s() > self._cpu_until_s:
            return True
        now_s = self._now_s()
        if now_s <= self._until_s:
            return False
        delay_s = self._read_delay_s()
        self._until_s += delay_s - self._delay_s
        self._delay_s = delay_s
        return now_s > self._until_s


def read_run_delay_s() -> float:
    """Returns how many seconds the calling thread has waited for a CPU, including throttled time.

    The time is the second field in ``/proc/thread-self/schedstat``
    (Documentation/scheduler/sched-stats.rst), or 0 if the kernel does not measure it.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read(_MAX_BYTES).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
