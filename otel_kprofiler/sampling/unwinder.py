"""The user unwinder of a sampler: which program takes user stacks, and the tables it needs."""

from __future__ import annotations

import logging
import mmap
import platform
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from otel_kprofiler.bpf import (
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
from otel_kprofiler.host import ReferableFiles
from otel_kprofiler.model import KnownFiles
from otel_kprofiler.sampling.sampler import SamplerConfig

if TYPE_CHECKING:
    from otel_kprofiler.unwinding import TableStore

FRAME_POINTERS: Final = "kprofiler_sample"
"""Name of the program that takes user stacks by frame pointers, if at all."""
BY_TABLES: Final = ("kprofiler_unwind", "kprofiler_unwind_5_10")
"""Programs that unwind user stacks, the one that needs the newer kernel first."""

_SLOTS: Final = 1024
_FILES: Final = 4 * _SLOTS
_REQUEST_RING_BYTES: Final = 64 * 1024
_FIRST: Final = bytes(4)
_UNUSED: Final[Mapping[str, int]] = {
    "rules": 1, "files": 1, "tables": 1, "table_used": 1, "file_requests": mmap.PAGESIZE,
}  # fmt: skip

_log = logging.getLogger(__name__)


class UnwindPlan(NamedTuple):
    """How to unwind on this host."""

    processor: Processor
    kernel: KernelOffsets


def plan_unwinding(
    config: SamplerConfig, read_types: Callable[[], KernelTypes], loader: str
) -> UnwindPlan | None:
    """How to unwind user stacks with tables; None if there are none, or if this host cannot."""
    if config.stacks == "kernel" or config.user_unwinding == "frame_pointers":
        return None
    processor = PROCESSORS.get(platform.machine())
    kernel = None
    if processor is None:
        reason = f"for {platform.machine()} there is no unwinder"
    elif loader != "libbpf":
        reason = f"the loader {loader} cannot load the unwinder"
    else:
        try:
            kernel = find_kernel_offsets(read_types())
            reason = "the kernel's structs are not those that the unwinder knows"
        except (OSError, ValueError):
            reason = "the kernel has no BTF"
    if processor is None or kernel is None:
        say_frame_pointers(reason)
        return None
    return UnwindPlan(processor, kernel)


def say_frame_pointers(reason: str) -> None:
    """Warn that user stacks will be short."""
    _log.warning(
        "user stacks follow frame pointers, up to the first return address that no call precedes: "
        "%s; most stacks of code without frame pointers are cut off",
        reason,
    )


def map_entries(plan: UnwindPlan | None, possible_cpus: int) -> dict[str, int]:
    """Sizes of the unwinder's maps."""
    if plan is None:
        return dict(_UNUSED)
    return {
        "rules": possible_cpus,
        "files": _FILES,
        "tables": _SLOTS,
        "table_used": _SLOTS,
        "file_requests": _REQUEST_RING_BYTES,
    }


def open_tables(
    plan: UnwindPlan,
    config: SamplerConfig,
    program: LoadedObject,
    files: ReferableFiles,
    known: KnownFiles,
) -> TableStore:
    """Configure the loaded unwinder, and start to answer its requests.

    Raises:
        OSError: a map cannot be written or mapped.
    """
    # Not needed without user stacks.
    from otel_kprofiler.unwinding import Limits, MapSizes, TableMaps, TableStore  # noqa: PLC0415

    packed = pack_unwind_config(
        plan.processor,
        plan.kernel,
        page_bytes=mmap.PAGESIZE,
        max_work=config.max_unwind_work,
    )
    update_map(program.map_fd("unwind_config"), _FIRST, packed)
    maps = TableMaps(program.map_fd, MapSizes(_FILES, _SLOTS, _REQUEST_RING_BYTES))
    limits = Limits(config.max_tables_bytes, config.max_table_bytes)
    store = TableStore(maps, files, limits, SystemTime().boot_ns, known)
    store.start()
    return store
