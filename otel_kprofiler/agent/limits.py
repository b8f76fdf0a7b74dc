"""Enforces the agent's resource limits by adapting the sampling rate."""

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from otel_kprofiler.agent.memory import read_resident_bytes

_AIM: Final = 0.8
"""Fraction of a limit that the agent should use after its sampling rate has been lowered."""
_CALM: Final = 0.6
"""Fraction of each limit below which the sampling rate may rise."""
_CALM_ROUNDS: Final = 6
"""Number of consecutive measurements below ``_CALM`` before the sampling rate rises."""
_GROWTH: Final = 1.25
_NEAR_INTERVAL_S: Final = 1.0
_STEEPEST: Final = 4
"""Maximum factor by which the sampling rate is reduced in one step."""


class Usage(NamedTuple):
    """Resource usage of this process: CPU in cores, resident memory in bytes."""

    cpu: float
    rss_bytes: int


class Limits(NamedTuple):
    """Limits on the CPU usage, in cores, and resident memory of this process; 0 means no limit."""

    cpu: float = 0.0
    rss_bytes: int = 0


class Meter:
    """Measures the resource usage of this process between calls."""

    def __init__(
        self,
        cpu_s: Callable[[], float] = time.process_time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpu_s, self._now = cpu_s, now
        self._before = (now(), cpu_s())

    def read(self) -> Usage:
        """Returns the CPU usage since the last call, and the current resident memory."""
        last, self._before = self._before, (self._now(), self._cpu_s())
        wall, cpu = (after - earlier for after, earlier in zip(self._before, last, strict=True))
        return Usage(cpu / wall if wall > 0 else 0.0, read_resident_bytes())


def next_look_s(usage: Usage, limits: Limits, interval_s: float) -> float:
    """Returns the seconds until the next measurement; at most 1 near the memory limit."""
    is_near = limits.rss_bytes and usage.rss_bytes > _AIM * limits.rss_bytes
    return min(interval_s, _NEAR_INTERVAL_S) if is_near else interval_s


class Governor:
    """Lowers the sampling rate immediately if a limit is exceeded, and raises the rate slowly."""

    def __init__(self) -> None:
        self._calm = 0

    def decide(self, usage: Usage, limits: Limits, rate: int, wanted: int) -> int:
        """Returns the new rate, 1 to ``wanted`` per second; ``usage`` was measured at ``rate``."""
        shares = [
            used / limit for used, limit in zip(usage, limits, strict=True) if limit
        ]  # fmt: skip
        worst = max(shares, default=0.0)
        if worst > 1:
            self._calm = 0
            return max(1, min(rate, wanted, int(rate * max(_AIM / worst, 1 / _STEEPEST))))
        self._calm = self._calm + 1 if worst < _CALM else 0
        if rate < wanted and self._calm >= _CALM_ROUNDS:
            self._calm = 0
            return min(wanted, int(rate * _GROWTH) + 1)
        return min(rate, wanted)
