"""Waits for samples: sleeps while there are none."""

from __future__ import annotations

from typing import Final

from otel_kprofiler.clock import Clock
from otel_kprofiler.sampling import Sampler

SETTLE_S: Final = 0.005
"""Delay until all samples taken before an instant can be drained."""


def wait_for_samples(
    sampler: Sampler, clock: Clock, end_ns: int, timeout_s: float, idle_s: float
) -> None:
    """Wait for the first sample, then for enough samples to justify a drain.

    Args:
        sampler: takes the samples; its ``wake`` ends the wait.
        clock: reads boottime.
        end_ns: boottime at which the window ends; the wait ends just after it.
        timeout_s: how long to wait for more samples, in seconds.
        idle_s: seconds to wait for the first sample; 0 if a sample may already be in the ring.
    """

    def limit_s(wait_s: float) -> float:
        return min(wait_s, max((end_ns - clock.boot_ns()) / 1e9, 0) + SETTLE_S)

    if not idle_s or sampler.wait_first(limit_s(idle_s)):
        sampler.wait(limit_s(timeout_s))
