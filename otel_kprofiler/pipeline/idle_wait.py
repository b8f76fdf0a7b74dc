"""Waits for samples; sleeps while none are pending."""

from typing import Final

from otel_kprofiler.clock import Clock
from otel_kprofiler.sampling import Sampler

SETTLE_S: Final = 0.005
"""Maximum time, in seconds, from taking a sample until the sample can be drained."""


def wait_for_samples(
    sampler: Sampler,
    clock: Clock,
    end_ns: int,
    *,
    timeout_s: float,
    longest_s: float,
    idle_s: float,
) -> None:
    """Wait for the first sample, then for enough samples to justify a drain.

    Returns on a wake-up, or shortly after the window ends at the boottime ``end_ns``.

    Args:
        timeout_s: how long to wait for further samples, in seconds.
        longest_s: maximum wait while no new process is sampled; ignored unless longer than
            ``timeout_s``.
        idle_s: how long to wait for the first sample; 0 if a sample may already be in the ring.
    """

    def limit_s(wait_s: float) -> float:
        return min(wait_s, max((end_ns - clock.boot_ns()) / 1e9, 0) + SETTLE_S)

    if not idle_s or sampler.wait_first(limit_s(idle_s)):
        if longest_s > timeout_s:
            sampler.wait_new(limit_s(timeout_s), limit_s(longest_s))
        else:
            sampler.wait(limit_s(timeout_s))
