"""Takes raw samples with eBPF programs."""

from otel_kprofiler.sampling.archive import DAMAGED, MAX_JSON_BYTES, Archive
from otel_kprofiler.sampling.command import CommandError, HeldCommand
from otel_kprofiler.sampling.follower import ProcessFollower
from otel_kprofiler.sampling.groups import GroupFollower, Groups
from otel_kprofiler.sampling.loading import has_btf
from otel_kprofiler.sampling.off_cpu import OffCpuConfig
from otel_kprofiler.sampling.on_cpu import EbpfSampler, RawSink
from otel_kprofiler.sampling.sampler import MAX_RING_BYTES, Sampler, SamplerConfig, SamplerCounts
from otel_kprofiler.sampling.target_maps import INITIAL_NAMESPACE
from otel_kprofiler.sampling.thread_dump import ThreadReader, ThreadReading
from otel_kprofiler.sampling.wait_joiner import WaitJoiner
