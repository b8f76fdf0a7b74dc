"""Warns if the kernel may throttle perf events at a given sampling rate.

``__perf_event_account_interrupt`` in kernel/events/core.c counts the samples of an event per tick.
The kernel throttles (stops) the event when the count reaches ``perf_event_max_sample_rate`` per
tick, rounded up. The next tick restarts a throttled event with a full period. With a limit of one
sample per tick, some kernels, such as 6.18, stop the event after each sample, so every sample is
taken one period after a tick.
"""

import time
from typing import Final

from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.kernel import find_sysctl

MAX_SAMPLE_RATE: Final = "kernel.perf_event_max_sample_rate"
_DEFAULT: Final = 100_000
_CLOCK_MONOTONIC_COARSE: Final = 6
"""A clock that advances at each tick (clock_gettime(2)); its resolution is the length of a tick."""

THROTTLING_FIX: Final = f"as root: sysctl -w {MAX_SAMPLE_RATE}={_DEFAULT}"


def get_tick_rate() -> int:
    """Returns the number of ticks per second on a busy CPU, which is ``CONFIG_HZ``."""
    return round(1 / time.clock_getres(_CLOCK_MONOTONIC_COARSE))


def find_throttling(files: HostFiles, samples_per_second: float, tick_rate: int) -> str:
    """Returns a warning if the kernel may throttle events at this rate, or an empty string."""
    limit = find_sysctl(files, MAX_SAMPLE_RATE)
    samples_per_tick = -(-samples_per_second // tick_rate)
    least = int(samples_per_tick) * tick_rate + 1
    if limit is None or limit >= least:
        return ""
    return (
        f"{MAX_SAMPLE_RATE} is {limit}, so the kernel may throttle the sampler for up to "
        f"{1000 / tick_rate:g} ms, until the next tick; samples are then counted as missed; set it "
        f"to {least} or more, {THROTTLING_FIX}"
    )
