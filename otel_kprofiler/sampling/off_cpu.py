"""Defines the settings for the off-CPU sampler."""

from dataclasses import dataclass
from typing import Final, Literal

from otel_kprofiler.bpf import WAIT_UNIT_NS

MAX_WAITS_PER_SECOND: Final = 10_000
USUAL_WAITS_PER_SECOND: Final = 20
MAX_THRESHOLD_NS: Final = ((1 << 32) - 1) * WAIT_UNIT_NS
"""Maximum threshold (18 minutes), which the BPF program stores in 32 bits."""
_MAX_MIN_DURATION_NS: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OffCpuConfig:
    """The settings for sampling waits. The total time of all waits is always counted.

    Attributes:
        samples_per_second: average number of waits sampled per second on each CPU, 0 to 10000. The
            rate determines the sampling threshold. If the rate is 0, only totals are counted.
        min_duration_ns: minimum duration of a sampled wait, 0 to 4.29 s. Shorter waits are counted
            only in totals.
        wakers: whether to record the waker for each wait.
        causes: whether to determine the causes of waits from stacks.
        leaves_out: threads whose waits are neither sampled nor counted: ``process`` excludes all
            threads of this process (for a profiler), ``threads`` excludes only its profiling
            threads (for a service), and an empty string excludes no threads.
    """

    samples_per_second: int = USUAL_WAITS_PER_SECOND
    min_duration_ns: int = 1_000
    wakers: bool = False
    causes: bool = True
    leaves_out: Literal["", "process", "threads"] = ""

    def __post_init__(self) -> None:
        for name, high in (
            ("samples_per_second", MAX_WAITS_PER_SECOND),
            ("min_duration_ns", _MAX_MIN_DURATION_NS),
        ):
            value = getattr(self, name)
            if not 0 <= value <= high:
                raise ValueError(f"{name} is {value}; it must be between 0 and {high}")
