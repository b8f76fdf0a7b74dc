"""The agent's own budget: measures what it uses, and says how fast it may sample."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from otel_kprofiler.agent.memory import read_resident_bytes

_AIM: Final = 0.8
"""Share of the budget that a lowered rate aims at."""
_CALM: Final = 0.6
"""Below this share of the budget the rate may grow."""
_CALM_ROUNDS: Final = 6
"""Measurements in a row below that share before the rate grows again."""
_GROWTH: Final = 1.25
_NEAR_INTERVAL_S: Final = 1.0
_STEEPEST: Final = 4
"""The rate is divided by this at most in one step."""


class Usage(NamedTuple):
    """What the process used: CPU time per time, 1 being one core; bytes of resident memory."""

    cpu: float
    rss_bytes: int


class Limits(NamedTuple):
    """What it may use; 0 means no limit."""

    cpu: float = 0.0
    rss_bytes: int = 0


class Meter:
    """Measures this process from one call to the next."""

    def __init__(
        self,
        cpu_s: Callable[[], float] = time.process_time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpu_s, self._now = cpu_s, now
        self._before = (now(), cpu_s())

    def read(self) -> Usage:
        """CPU since the last call, and resident memory now."""
        before, self._before = self._before, (self._now(), self._cpu_s())
        wall, cpu = (after - earlier for after, earlier in zip(self._before, before, strict=True))
        return Usage(cpu / wall if wall > 0 else 0.0, read_resident_bytes())


def next_look_s(usage: Usage, limits: Limits, interval_s: float) -> float:
    """Seconds until usage is measured again: memory near its limit grows within a second."""
    is_near = limits.rss_bytes and usage.rss_bytes > _AIM * limits.rss_bytes
    return min(interval_s, _NEAR_INTERVAL_S) if is_near else interval_s


class Governor:
    """Decides on the rate: down at once when a limit is passed, up again slowly."""

    def __init__(self) -> None:
        self._calm = 0

    def decide(self, usage: Usage, limits: Limits, rate: int, wanted: int) -> int:
        """Samples per second for the time to come, 1 to ``wanted``.

        Args:
            usage: what was used at ``rate``.
            limits: what may be used.
            rate: samples per second up to now.
            wanted: samples per second by configuration.
        """
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
