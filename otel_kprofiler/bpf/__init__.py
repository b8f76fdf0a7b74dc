"""BPF programs: the sampler, the loaders, the ring reader, BTF."""

from pathlib import Path
from typing import Final

from otel_kprofiler.bpf.bcc import BccLoader
from otel_kprofiler.bpf.btf import (
    VMLINUX as VMLINUX_BTF,
)
from otel_kprofiler.bpf.btf import (
    ProgramBtf,
    find_member_offsets,
    parse_program_btf,
)
from otel_kprofiler.bpf.call import bpf_call
from otel_kprofiler.bpf.choice import LOADERS, get_loader
from otel_kprofiler.bpf.kernel_types import KernelTypes
from otel_kprofiler.bpf.layout import (
    A64,
    COMM_BYTES,
    DESCENDANTS,
    KEEP_IDLE,
    KERNEL_STACKS,
    MAX_CGROUP_LEVEL,
    MAX_INTERRUPT_RANGES,
    NAMESPACE,
    ONLY_CGROUPS,
    ONLY_COMMS,
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
    LoadedObject,
    Loader,
    ObjectSpec,
)
from otel_kprofiler.bpf.map_calls import (
    PAGE_BYTES,
    create_inner_map,
    delete_from_map,
    update_map,
)
from otel_kprofiler.bpf.python import (
    PYTHON_CFRAME,
    PYTHON_IS_ENTRY,
    PythonLayout,
    PythonProcess,
)
from otel_kprofiler.bpf.python_codes import ProcessSeen, Program
from otel_kprofiler.bpf.python_maps import (
    MAX_PYTHON_PROCESSES,
    PYTHON_OUTCOMES,
    PythonMaps,
    PythonOffsets,
    find_python_offsets,
    python_map_entries,
)
from otel_kprofiler.bpf.python_span import (
    VALUES_BY_POINTER,
    VALUES_INLINE,
    VALUES_TAGGED,
    SpanClass,
    SpanPath,
    set_span_path,
)
from otel_kprofiler.bpf.ring import (
    RECORD_OVERHEAD,
    Fence,
    RingChunk,
    RingMemory,
    RingReader,
    record_spans,
    ring_bytes,
)
from otel_kprofiler.bpf.spans import SpanLayout, SpanSlots
from otel_kprofiler.bpf.unwind import (
    DEFAULT_MAX_WORK,
    PROCESSORS,
    KernelOffsets,
    Processor,
    find_kernel_offsets,
    pack_unwind_config,
)
from otel_kprofiler.bpf.waits import (
    PLACES,
    WAIT_HAS_BEGUN,
    WAIT_IN_IOWAIT,
    WAIT_IS_THROTTLED,
    WAIT_KEPT,
    WAIT_LAYOUT,
    ThreadTable,
    WaitConfig,
    WaitCounts,
    WaitEnd,
    WaitLines,
    WaitOffsets,
    WaitRecord,
    WaitRecords,
    WaitSettings,
    WaitThread,
    find_wait_offsets,
    parse_threads,
    parse_wait_counts,
)

PROGRAMS: Final = Path(__file__).with_name("programs")
"""Sources and objects of the BPF programs."""
SAMPLER_SOURCE: Final = PROGRAMS / "sampler.bpf.c"
SAMPLER_OBJECT: Final = PROGRAMS / "sampler.bpf.o"


__all__ = [
    "A64",
    "COMM_BYTES",
    "DEFAULT_MAX_WORK",
    "DESCENDANTS",
    "KEEP_IDLE",
    "KERNEL_STACKS",
    "LOADERS",
    "MAX_CGROUP_LEVEL",
    "MAX_INTERRUPT_RANGES",
    "MAX_PYTHON_PROCESSES",
    "NAMESPACE",
    "ONLY_CGROUPS",
    "ONLY_COMMS",
    "ONLY_TARGETS",
    "PAGE_BYTES",
    "PLACES",
    "PROCESSORS",
    "PROGRAMS",
    "PYTHON_CFRAME",
    "PYTHON_IS_ENTRY",
    "PYTHON_OUTCOMES",
    "RECORD_HEADER_BYTES",
    "RECORD_OVERHEAD",
    "RECORD_VERSION",
    "SAMPLER_OBJECT",
    "SAMPLER_SOURCE",
    "SPAN_LINKS",
    "STACK_BYTES",
    "START_TIME",
    "USER_STACKS",
    "VALUES_BY_POINTER",
    "VALUES_INLINE",
    "VALUES_TAGGED",
    "VMLINUX_BTF",
    "WAIT_HAS_BEGUN",
    "WAIT_IN_IOWAIT",
    "WAIT_IS_THROTTLED",
    "WAIT_KEPT",
    "WAIT_LAYOUT",
    "BccLoader",
    "CpuLines",
    "Fence",
    "KernelOffsets",
    "KernelTypes",
    "LibbpfLoader",
    "LoadedObject",
    "Loader",
    "ObjectSpec",
    "ProcessSeen",
    "Processor",
    "Program",
    "ProgramBtf",
    "ProgramConfig",
    "ProgramCounts",
    "PythonLayout",
    "PythonMaps",
    "PythonOffsets",
    "PythonProcess",
    "RingChunk",
    "RingMemory",
    "RingReader",
    "SpanClass",
    "SpanLayout",
    "SpanPath",
    "SpanSlots",
    "ThreadTable",
    "WaitConfig",
    "WaitCounts",
    "WaitEnd",
    "WaitLines",
    "WaitOffsets",
    "WaitRecord",
    "WaitRecords",
    "WaitSettings",
    "WaitThread",
    "bpf_call",
    "create_inner_map",
    "delete_from_map",
    "find_kernel_offsets",
    "find_member_offsets",
    "find_python_offsets",
    "find_wait_offsets",
    "get_loader",
    "pack_unwind_config",
    "parse_counts",
    "parse_program_btf",
    "parse_records",
    "parse_threads",
    "parse_wait_counts",
    "python_map_entries",
    "record_spans",
    "ring_bytes",
    "set_span_path",
    "update_map",
]
