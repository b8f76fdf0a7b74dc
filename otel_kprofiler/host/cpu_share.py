"""Limits work to a long-term fraction of one CPU."""

from typing import Final

BURST_NS: Final = 1_000_000_000
"""Default limit on a burst of CPU time after a quiet period, in nanoseconds."""
_REFILL_NS: Final = 10_000_000


class CpuShare:
    """A token bucket that gains ``share`` seconds of CPU time per second; not thread-safe.

    The bucket can hold ``burst_ns`` of CPU time, and is initially full.
    """

    def __init__(self, share: float, burst_ns: int = BURST_NS) -> None:
        self._share = share
        self._burst_ns = self._earned_ns = burst_ns
        self._refilled_ns = 0

    def wait_ns(self, now_ns: int) -> int:
        """Returns the nanoseconds to wait until CPU time may be spent; 0 if it may be spent now."""
        more_ns = int((now_ns - self._refilled_ns) * self._share)
        self._earned_ns = min(self._burst_ns, self._earned_ns + more_ns)
        self._refilled_ns = now_ns
        return 0 if self._earned_ns > 0 else 1 + int(-self._earned_ns / self._share)

    def is_spent(self, now_ns: int) -> bool:
        """Returns whether work must wait. Unless it must, adds earned time only every ten ms."""
        if self._earned_ns > 0 and now_ns - self._refilled_ns < _REFILL_NS:
            return False
        return self.wait_ns(now_ns) > 0

    def spend(self, cpu_ns: int) -> None:
        """Deduct used CPU time from the budget.

        If the CPU time exceeds the budget, later work is delayed.
        """
        self._earned_ns -= cpu_ns
