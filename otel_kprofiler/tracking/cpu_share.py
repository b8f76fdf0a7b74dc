"""A share of a CPU that work may take in the long run."""

from __future__ import annotations

from typing import Final

BURST_NS: Final = 1_000_000_000
"""How much CPU time may be spent at once after a quiet time."""


class CpuShare:
    """CPU time that is earned as time passes, and spent. For one thread.

    Args:
        share: CPU time earned per time.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._earned_ns = BURST_NS
        self._refilled_ns = 0

    def wait_ns(self, now_ns: int) -> int:
        """How long to wait until something may be spent; 0 if it may be now."""
        more_ns = int((now_ns - self._refilled_ns) * self._share)
        self._earned_ns = min(BURST_NS, self._earned_ns + more_ns)
        self._refilled_ns = now_ns
        return 0 if self._earned_ns > 0 else 1 + int(-self._earned_ns / self._share)

    def spend(self, cpu_ns: int) -> None:
        """Note CPU time that was taken; more than was earned is paid back by waiting."""
        self._earned_ns -= cpu_ns
