"""Samplers: the eBPF sampler of this host, and the replay of a recording."""

from otel_kprofiler.sampling.archive import DAMAGED
from otel_kprofiler.sampling.code import EventSink, RecordedCode, ReplayedCode
from otel_kprofiler.sampling.command import HeldCommand
from otel_kprofiler.sampling.ebpf import EbpfSampler, RawSink
from otel_kprofiler.sampling.modules import RecordedModules, ReplayedModules
from otel_kprofiler.sampling.recording import Recording, RecordingFacts, RecordingWriter
from otel_kprofiler.sampling.replay import ReplaySampler
from otel_kprofiler.sampling.sampler import (
    Sampler,
    SamplerConfig,
    SamplerCounts,
)

__all__ = [
    "DAMAGED",
    "EbpfSampler",
    "EventSink",
    "HeldCommand",
    "RawSink",
    "RecordedCode",
    "RecordedModules",
    "Recording",
    "RecordingFacts",
    "RecordingWriter",
    "ReplaySampler",
    "ReplayedCode",
    "ReplayedModules",
    "Sampler",
    "SamplerConfig",
    "SamplerCounts",
]
