"""Defines the settings of the off-CPU sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from otel_kprofiler.bpf import WAIT_UNIT_NS

MAX_WAITS_PER_SECOND: Final = 10_000
USUAL_WAITS_PER_SECOND: Final = 20
MAX_THRESHOLD_NS: Final = ((1 << 32) - 1) * WAIT_UNIT_NS
"""Maximum threshold, 18 minutes, because the BPF program stores it in 32 bits."""
_MAX_MIN_DURATION_NS: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OffCpuConfig:
    """The settings for sampling waits. Exact totals are always counted.

    Attributes:
        samples_per_second: average rate of sampled waits on each CPU, 0 to 10000. It determines the
            threshold from which every wait is sampled. 0 means totals only.
        min_duration_ns: shorter waits are never sampled, 0 to 4.29 s; the totals count them.
        wakers: whether to record which thread ended a wait.
        causes: whether to determine causes of waits from stacks.
        leaves_out: threads whose waits are neither sampled nor counted: all threads of this
            ``process`` (a profiler), only its profiling ``threads`` (in a service), or none if
            empty.
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
                raise ValueError(f"{name} is {value}; it must be 0 to {high}")
