"""Encodes the sampler's settings for the BPF program."""

import os
import platform

from otel_kprofiler.bpf import (
    A64,
    DESCENDANTS,
    KEEP_IDLE,
    KERNEL_STACKS,
    NAMESPACE,
    ONLY_CGROUPS,
    ONLY_COMMS,
    ONLY_TARGETS,
    PROGRAM_AND_OWNER,
    SPAN_LINKS,
    START_TIME,
    THREAD_CONTEXTS,
    USER_STACKS,
    ProgramConfig,
    TaskOffsets,
)
from otel_kprofiler.errors import KernelFeatureError
from otel_kprofiler.sampling.sampler import SamplerConfig
from otel_kprofiler.sampling.target_maps import INITIAL_NAMESPACE


def pack_config(
    config: SamplerConfig,
    *,
    offsets: TaskOffsets | None,
    thread_pointer: int,
    wakeup_bytes: int,
    stack_limit: int,
    regular_since_ns: int,
) -> bytes:
    """Returns the settings, encoded for the BPF program.

    ``thread_pointer`` is the offset of the user thread pointer in ``task_struct``; 0 disables
    thread contexts. The program wakes the reader when the ring contains ``wakeup_bytes``. Each
    stack occupies at most ``stack_limit`` bytes. See :meth:`Attachment.configure` for
    ``regular_since_ns``.

    Raises ``KernelFeatureError`` if descendants cannot be tracked.
    """
    flags = 0 if config.stacks == "user" else KERNEL_STACKS
    flags |= 0 if config.stacks == "kernel" else USER_STACKS
    flags |= KEEP_IDLE if config.send_idle_frames else 0
    flags |= ONLY_TARGETS if config.target_pids else 0
    flags |= ONLY_COMMS if config.target_comms else 0
    flags |= ONLY_CGROUPS if config.target_cgroups else 0
    flags |= SPAN_LINKS if config.span_layout else 0
    flags |= START_TIME if offsets else 0
    flags |= PROGRAM_AND_OWNER if offsets and offsets.program else 0
    flags |= NAMESPACE if config.target_namespace else 0
    flags |= DESCENDANTS if config.target_descendants else 0
    flags |= THREAD_CONTEXTS if thread_pointer and offsets and offsets.program else 0
    flags |= A64 if platform.machine() == "aarch64" else 0
    if config.target_descendants and not offsets:
        raise KernelFeatureError(
            "tracking a process's descendants needs BTF, which this kernel lacks",
            hint="use a kernel built with CONFIG_DEBUG_INFO_BTF, or profile a single process",
        )
    leader, start, parent, tgid, comm, program = offsets or (0, 0, 0, 0, 0, None)
    device, inode = config.target_namespace or (0, INITIAL_NAMESPACE)
    levels = {1 << level for level, _ in config.target_cgroups}
    return ProgramConfig(
        flags, config.min_process_age_ns, leader, start, wakeup_bytes, stack_limit,
        config.interrupt_ranges, _kernel_device(device), inode, parent, tgid, comm, sum(levels),
        config.period_ns if config.child_pid is None else 0, regular_since_ns, thread_pointer,
        program, config.span_layout,
    ).pack()  # fmt: skip


def _kernel_device(device: int) -> int:
    """Returns ``st_dev`` in the kernel's internal encoding (MKDEV in include/linux/kdev_t.h)."""
    return os.major(device) << 20 | os.minor(device)
