"""The BPF programs, such as the sampler, and their loaders, ring reader and BTF parser."""

from pathlib import Path
from typing import Final

from otel_kprofiler.bpf.bcc import BccLoader
from otel_kprofiler.bpf.btf import (
    VMLINUX_BTF,
    KernelTypes,
    ProgramBtf,
    list_tracepoints,
    parse_program_btf,
)
from otel_kprofiler.bpf.call import bpf_call
from otel_kprofiler.bpf.choice import get_loader
from otel_kprofiler.bpf.dump import (
    DUMP_ROW_BYTES,
    IN_IOWAIT,
    ON_A_CPU,
    DumpRow,
    MemoryLayoutMap,
    pack_memory_layout,
    parse_dump_rows,
)
from otel_kprofiler.bpf.events import EVENT_LAYOUT, EventOffsets, find_event_offsets
from otel_kprofiler.bpf.iterators import iterate, link_iterator, open_iterator
from otel_kprofiler.bpf.layout import (
    A64,
    COMM_BYTES,
    DESCENDANTS,
    KEEP_IDLE,
    KERNEL_STACKS,
    MAX_CGROUP_LEVEL,
    MAX_INTERRUPT_RANGES,
    NAMESPACE,
    NO_WAKEUP_NS,
    ONLY_CGROUPS,
    ONLY_COMMS,
    ONLY_TARGETS,
    PROGRAM_AND_OWNER,
    RECORD_HEADER_BYTES,
    RECORD_VERSION,
    SPAN_LINKS,
    START_TIME,
    THREAD_CONTEXTS,
    USER_STACKS,
    CpuLines,
    ProgramConfig,
    ProgramCounts,
    ReaderFlag,
    number_kinds,
    parse_records,
)
from otel_kprofiler.bpf.libbpf import LibbpfLoader
from otel_kprofiler.bpf.loader import LoadedObject, Loader, ObjectSpec, without_signals
from otel_kprofiler.bpf.locks import (
    LOCK_BEGIN,
    LOCK_BUCKETS,
    LOCK_END,
    LOCK_LAYOUT,
    LockLines,
    LockOffsets,
    LockSettings,
    find_lock_offsets,
    pack_lock_layout,
)
from otel_kprofiler.bpf.map_calls import (
    PAGE_BYTES,
    create_inner_map,
    delete_from_map,
    update_map,
    write_pages,
)
from otel_kprofiler.bpf.mapped_words import MappedWords
from otel_kprofiler.bpf.python import PYTHON_CFRAME, PYTHON_IS_ENTRY, PythonLayout, PythonProcess
from otel_kprofiler.bpf.python_codes import ProcessSeen, Program
from otel_kprofiler.bpf.python_maps import (
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
    RingMemory,
    RingReader,
    record_spans,
    ring_bytes,
)
from otel_kprofiler.bpf.spans import SpanLayout
from otel_kprofiler.bpf.task_offsets import TaskOffsets, find_task_offsets
from otel_kprofiler.bpf.thread_contexts import (
    IS_GO,
    MAX_CONTEXT_PROCESSES,
    SLOT_WORDS,
    SPAN_LABEL,
    TRACE_LABEL,
    ContextKind,
    ContextPlace,
    GoOffsets,
    ThreadContexts,
    find_thread_pointer,
    split_named,
)
from otel_kprofiler.bpf.tracepoints import (
    MAX_ARGUMENTS,
    TRACEPOINT,
    TRACEPOINT_PROGRAM,
    TracedCpus,
    TracepointConstants,
    TracepointValue,
    attach_tracepoint,
    count_recursions,
)
from otel_kprofiler.bpf.unwind import (
    DEFAULT_MAX_WORK,
    KEEP_MAPPINGS,
    PROCESSORS,
    KernelOffsets,
    Processor,
    find_kernel_offsets,
    pack_unwind_config,
)
from otel_kprofiler.bpf.wait_maps import (
    PLACES,
    WAIT_HAS_BEGUN,
    WAIT_IN_IOWAIT,
    WAIT_IS_THROTTLED,
    WAIT_KEPT,
    WAIT_LAYOUT,
    WAIT_UNIT_NS,
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
"""Directory of the BPF programs' source and object files."""
SAMPLER_SOURCE: Final = PROGRAMS / "sampler.bpf.c"
SAMPLER_OBJECT: Final = PROGRAMS / "sampler.bpf.o"
DUMP_SOURCE: Final = PROGRAMS / "dump.bpf.c"
DUMP_OBJECT: Final = PROGRAMS / "dump.bpf.o"
