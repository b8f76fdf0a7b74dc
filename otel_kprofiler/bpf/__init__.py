"""BPF programs: the sampler, the loaders, the ring reader, BTF."""

from pathlib import Path
from typing import Final

from otel_kprofiler.bpf.bcc import BccLoader
from otel_kprofiler.bpf.btf import VMLINUX as VMLINUX_BTF
from otel_kprofiler.bpf.btf import find_member_offsets
from otel_kprofiler.bpf.choice import LOADERS, get_loader
from otel_kprofiler.bpf.code_events import CodeLoss
from otel_kprofiler.bpf.kallsyms import IteratedKallsyms, find_hidden_symbols
from otel_kprofiler.bpf.ksymbol import (
    KsymbolRecord,
    LostRecord,
    ProgramRecord,
    make_changes,
    parse_perf_records,
)
from otel_kprofiler.bpf.layout import (
    DESCENDANTS,
    KEEP_IDLE,
    KERNEL_STACKS,
    MAX_INTERRUPT_RANGES,
    NAMESPACE,
    ONLY_TARGETS,
    RECORD_HEADER_BYTES,
    RECORD_VERSION,
    SPAN_LINKS,
    STACK_BYTES,
    START_TIME,
    USER_STACKS,
    CpuLines,
    ProgramConfig,
    ProgramCounts,
    parse_counts,
    parse_records,
)
from otel_kprofiler.bpf.libbpf import LibbpfLoader
from otel_kprofiler.bpf.loader import (
    LoadedProgram,
    Loader,
    ProgramSpec,
    delete_from_map,
    update_map,
)
from otel_kprofiler.bpf.ring import (
    RECORD_OVERHEAD,
    RingChunk,
    RingMemory,
    RingReader,
    record_spans,
    ring_bytes,
)
from otel_kprofiler.bpf.rungs import Rung, find_code_symbols
from otel_kprofiler.bpf.spans import SpanLayout, SpanSlots
from otel_kprofiler.bpf.watch import CodeCounts, CodeWatch

SAMPLER_SOURCE: Final = Path(__file__).with_name("sampler.bpf.c")
SAMPLER_OBJECT: Final = Path(__file__).with_name("sampler.bpf.o")

__all__ = [
    "DESCENDANTS",
    "KEEP_IDLE",
    "KERNEL_STACKS",
    "LOADERS",
    "MAX_INTERRUPT_RANGES",
    "NAMESPACE",
    "ONLY_TARGETS",
    "RECORD_HEADER_BYTES",
    "RECORD_OVERHEAD",
    "RECORD_VERSION",
    "SAMPLER_OBJECT",
    "SAMPLER_SOURCE",
    "SPAN_LINKS",
    "STACK_BYTES",
    "START_TIME",
    "USER_STACKS",
    "VMLINUX_BTF",
    "BccLoader",
    "CodeCounts",
    "CodeLoss",
    "CodeWatch",
    "CpuLines",
    "IteratedKallsyms",
    "KsymbolRecord",
    "LibbpfLoader",
    "LoadedProgram",
    "Loader",
    "LostRecord",
    "ProgramConfig",
    "ProgramCounts",
    "ProgramRecord",
    "ProgramSpec",
    "RingChunk",
    "RingMemory",
    "RingReader",
    "Rung",
    "SpanLayout",
    "SpanSlots",
    "delete_from_map",
    "find_code_symbols",
    "find_hidden_symbols",
    "find_member_offsets",
    "get_loader",
    "make_changes",
    "parse_counts",
    "parse_perf_records",
    "parse_records",
    "record_spans",
    "ring_bytes",
    "update_map",
]
