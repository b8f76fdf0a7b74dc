"""Selects the BPF program that collects user stacks, and opens its unwind tables."""

from __future__ import annotations

import logging
import mmap
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from otel_kprofiler.bpf import (
    KEEP_MAPPINGS,
    PROCESSORS,
    KernelOffsets,
    KernelTypes,
    LoadedObject,
    Processor,
    find_kernel_offsets,
    pack_unwind_config,
    update_map,
)
from otel_kprofiler.clock import SystemTime
from otel_kprofiler.errors import describe_error
from otel_kprofiler.host import (
    FileRequest,
    HostFiles,
    PatientCalls,
    ReferableFiles,
    find_descendants,
    parse_mappings,
    read_maps,
    read_processes,
)
from otel_kprofiler.model import KnownFiles
from otel_kprofiler.sampling.sampler import SamplerConfig
from otel_kprofiler.sampling.target_maps import INITIAL_NAMESPACE

if TYPE_CHECKING:
    from otel_kprofiler.unwinding import TableStore

FRAME_POINTERS: Final = "kprofiler_sample"
"""Name of the program used if user stacks are not collected, or are unwound by frame pointer."""
BY_TABLES: Final = ("kprofiler_unwind", "kprofiler_unwind_5_10")
"""Names of the programs that use unwind tables. Programs that require newer kernels come first."""
LIST_FILES: Final = "kprofiler_list_files"
"""Name of the program that lists files mapped as code."""

_SLOTS: Final = 1024
_FILES: Final = 4 * _SLOTS
_REQUEST_RING_BYTES: Final = 64 * 1024
_LEAST_LOADING: Final = 0.5
"""Fraction of ``max_preload_s`` reserved for loading tables, even if listing the files takes a long
time."""
_PATIENCE: Final = 0.5
"""Time limit for each wait while listing mapped files, as a fraction of ``max_preload_s``."""
_FIRST: Final = bytes(4)
_UNUSED: Final[Mapping[str, int]] = {
    "rules": 1, "files": 1, "tables": 1, "table_used": 1, "file_requests": mmap.PAGESIZE,
}  # fmt: skip

_log = logging.getLogger(__name__)


class UnwindPlan(NamedTuple):
    """A plan for unwinding on this host.

    ``lists_files`` states whether the kernel can list mapped files.
    """

    processor: Processor
    kernel: KernelOffsets
    lists_files: bool


def plan_unwinding(
    config: SamplerConfig, read_types: Callable[[], KernelTypes], loader: str
) -> UnwindPlan | None:
    """Plans table-based unwinding; returns None if it is off or not supported on this host."""
    if config.stacks == "kernel" or config.user_unwinding == "frame_pointers":
        return None
    processor = PROCESSORS.get(platform.machine())
    kernel, lists_files = None, False
    if processor is None:
        reason = f"there is no unwinder for {platform.machine()}"
    elif loader != "libbpf":
        reason = f"the loader {loader} cannot load the unwinder"
    else:
        try:
            types = read_types()
            kernel = find_kernel_offsets(types)
            lists_files = types.size("bpf_iter__task_vma") is not None  # since 5.12
            reason = "the unwinder does not support this kernel's struct layout"
        except (OSError, ValueError):
            reason = "the kernel has no BTF"
    if processor is None or kernel is None:
        say_frame_pointers(reason)
        return None
    return UnwindPlan(processor, kernel, lists_files and config.max_preload_s > 0)


def unwind_choices(plan: UnwindPlan | None) -> Sequence[UnwindPlan | None]:
    """Returns the plans to try in order, with decreasing kernel requirements."""
    if plan is None:
        return (None,)
    return (plan, plan._replace(lists_files=False), None) if plan.lists_files else (plan, None)


def say_frame_pointers(reason: str) -> None:
    """Log a warning that user stacks without frame pointers will be truncated."""
    _log.warning(
        "user stacks are unwound using frame pointers (%s); most stacks in code compiled without "
        "frame pointers are truncated",
        reason,
    )


def map_entries(plan: UnwindPlan | None, possible_cpus: int) -> dict[str, int]:
    """Returns the number of entries in each unwinder map, by map name."""
    if plan is None:
        return dict(_UNUSED)
    return {
        "rules": possible_cpus,
        "files": _FILES,
        "tables": _SLOTS,
        "table_used": _SLOTS,
        "file_requests": _REQUEST_RING_BYTES,
    }


def find_address_bits(files: HostFiles) -> int:
    """Returns the width of user addresses on this kernel, in bits; 64 if unknown.

    The width is derived from this process's stack, which is near the highest user address.
    """
    try:
        mappings = parse_mappings(read_maps(files, "self"))
        return (max(mapping.end for mapping in mappings) - 1).bit_length()
    except (OSError, ValueError):
        return 64


def open_tables(
    plan: UnwindPlan,
    config: SamplerConfig,
    program: LoadedObject,
    files: ReferableFiles,
    known_files: KnownFiles,
) -> TableStore:
    """Configure the loaded unwinder, and start handling its requests. Raises ``OSError``."""
    # This import is needed only for user stacks.
    from otel_kprofiler.unwinding import Limits, MapSizes, TableMaps, TableStore  # noqa: PLC0415

    address_bits = find_address_bits(files)

    def configure(kernel: KernelOffsets) -> None:
        packed = pack_unwind_config(
            plan.processor,
            kernel,
            page_bytes=mmap.PAGESIZE,
            max_work=config.max_unwind_work,
            address_bits=address_bits,
        )
        update_map(program.map_fd("unwind_config"), _FIRST, packed)

    # While the BPF program that lists files runs, it uses the unwinder's memory for mappings.
    configure(plan.kernel._replace(flags=plan.kernel.flags & ~KEEP_MAPPINGS))
    maps = TableMaps(program.map_fd, MapSizes(_FILES, _SLOTS, _REQUEST_RING_BYTES))
    limits = Limits(config.max_tables_bytes, config.max_table_bytes)
    store = TableStore(maps, files, limits, SystemTime().boot_ns, known_files)
    store.start()
    if not plan.lists_files or _load_running(store, config, program.program_fd(LIST_FILES), files):
        configure(plan.kernel)
    return store


def _load_running(
    store: TableStore, config: SamplerConfig, program_fd: int, files: ReferableFiles
) -> bool:
    """Load tables for the running programs that will be sampled, and for ``preload_paths``.

    Returns whether the BPF program that lists the files of running programs has finished.
    """
    from otel_kprofiler.unwinding import list_running, map_files  # noqa: PLC0415

    until_s = time.monotonic() + config.max_preload_s
    pids = set(config.target_pids if config.child_pid is None else (config.child_pid,))
    if config.target_descendants:
        pids |= find_descendants(read_processes(files), pids)
    namespace = config.target_namespace
    running: list[FileRequest] = []

    def find_running() -> None:
        try:
            running.extend(
                list_running(
                    program_fd,
                    files,
                    pids,
                    mapped=mapped,
                    is_inner=namespace is not None and namespace[1] != INITIAL_NAMESPACE,
                    until_s=until_s,
                )
            )
        except OSError as error:
            _log.info(
                "the first stacks will be truncated, because the kernel does not list mapped "
                "files: %s",
                describe_error(error),
            )

    # The iterator takes each process's mmap_lock. A process that waits for a file server in mmap(2)
    # may hold its mmap_lock forever.
    calls = PatientCalls("kprofiler-list", config.max_preload_s * _PATIENCE)
    with map_files(config.preload_paths) as mapped:
        if has_ended := calls.call("maps", find_running):
            # On a busy host, waiting for the mmap_locks may have used up the preload time.
            least_s = config.max_preload_s * _LEAST_LOADING
            store.load_early(running, max(until_s, time.monotonic() + least_s))
        else:
            _log.warning(
                "the first stacks will be truncated: a process is stuck holding its mmap_lock"
            )
    calls.stop()
    return has_ended
