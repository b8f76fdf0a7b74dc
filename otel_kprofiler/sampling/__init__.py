"""Samplers: the eBPF sampler of this host, and the replay of a recording."""

from otel_kprofiler.sampling.command import HeldCommand
from otel_kprofiler.sampling.ebpf import EbpfSampler, RawSink
from otel_kprofiler.sampling.sampler import (
    Sampler,
    SamplerConfig,
    SamplerCounts,
    find_interrupt_ranges,
)

__all__ = [
    "EbpfSampler",
    "HeldCommand",
    "RawSink",
    "Sampler",
    "SamplerConfig",
    "SamplerCounts",
    "find_interrupt_ranges",
]
