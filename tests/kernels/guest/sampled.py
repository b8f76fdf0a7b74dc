"""Takes samples with the package's sampler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from otel_kprofiler.model import RawSample
from otel_kprofiler.sampling import EbpfSampler, OffCpuConfig, SamplerConfig


@contextmanager
def sampler(
    samples_per_second: int = 199,
    *,
    stacks: Literal["kernel", "user", "both"] = "kernel",
    off_cpu: OffCpuConfig | None = None,
) -> Iterator[EbpfSampler]:
    """Runs a sampler during the block; if ``off_cpu`` is given, it samples waits, not CPU time."""
    running = EbpfSampler(
        SamplerConfig(
            samples_per_second=samples_per_second,
            stacks=stacks,
            on_cpu=off_cpu is None,
            off_cpu=off_cpu,
        )
    )
    running.start()
    try:
        yield running
    finally:
        running.close()


def drain_for(running: EbpfSampler, seconds: float) -> list[RawSample]:
    samples: list[RawSample] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        running.wait(0.25)
        samples += running.drain()
    return samples


def drain_until(
    running: EbpfSampler, enough: Callable[[list[RawSample]], bool], timeout_s: float = 300
) -> list[RawSample]:
    """Drains until ``enough`` returns true or the timeout expires. A busy host slows the guest."""
    samples: list[RawSample] = []
    end = time.monotonic() + timeout_s
    while not enough(samples) and time.monotonic() < end:
        samples += drain_for(running, 0.5)
    return samples


def finish(running: EbpfSampler) -> list[RawSample]:
    running.stop()
    rest = running.drain()
    counts = running.counts()["on_cpu"]
    assert counts.taken == counts.received + sum(counts.lost.values())
    return rest


def sample(seconds: float) -> list[RawSample]:
    with sampler() as running:
        return drain_for(running, seconds) + finish(running)
