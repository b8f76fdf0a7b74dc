"""Measures the CPU time of this process."""

import resource
import time


class CpuMeter:
    """Measures the CPU time of this process and its reaped children; not thread-safe."""

    def __init__(self) -> None:
        self._last = (time.monotonic(), _read_cpu_s())

    def share(self) -> float | None:
        """Returns the CPU usage since the last call, in CPUs; None if no time has elapsed."""
        now = time.monotonic(), _read_cpu_s()
        wall, cpu = (after - earlier for after, earlier in zip(now, self._last, strict=True))
        self._last = now
        return cpu / wall if wall > 0 else None


def _read_cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
