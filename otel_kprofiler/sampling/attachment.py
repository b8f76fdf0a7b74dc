"""Kernel objects of a running sampler: program, maps, ring, events."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import platform
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from otel_kprofiler.bpf import (
    A64,
    DESCENDANTS,
    KEEP_IDLE,
    KERNEL_STACKS,
    NAMESPACE,
    ONLY_TARGETS,
    RECORD_HEADER_BYTES,
    RECORD_OVERHEAD,
    SAMPLER_OBJECT,
    SAMPLER_SOURCE,
    SPAN_LINKS,
    START_TIME,
    USER_STACKS,
    VMLINUX_BTF,
    CpuLines,
    LoadedObject,
    Loader,
    ObjectSpec,
    ProgramConfig,
    RingMemory,
    RingReader,
    SpanSlots,
    delete_from_map,
    find_member_offsets,
    ring_bytes,
    update_map,
)
from otel_kprofiler.errors import HostError, KernelFeatureError, SamplerError
from otel_kprofiler.host import (
    OLDEST_KERNEL,
    HostFiles,
    KernelRelease,
    find_open_files_error,
    find_sysctl,
    get_privilege_error,
    read_possible_cpus,
    read_release,
)
from otel_kprofiler.model import MAX_FRAMES, KnownFiles
from otel_kprofiler.sampling.events import ChildEvents, CpuEvents, Events
from otel_kprofiler.sampling.sampler import SamplerConfig
from otel_kprofiler.sampling.unwinder import (
    BY_TABLES,
    FRAME_POINTERS,
    UnwindPlan,
    map_entries,
    open_tables,
    plan_unwinding,
    say_frame_pointers,
)

if TYPE_CHECKING:
    from otel_kprofiler.unwinding import Files, TableStore

_PLANNED_FRAMES: Final = 64
_PLANNED_DRAINS: Final = 4
_MIN_RING_BYTES: Final = 256 * 1024
_TARGETS: Final = 1024
_INITIAL_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h
_FIRST = bytes(4)  # key of an array's only element

_log = logging.getLogger(__name__)


class Attachment:
    """The loaded program and its maps; the constructor opens all, or raises and leaves none open.

    Attributes:
        lines: counters of the program.
        ring: reader of its records.
        events: perf events that run it.
        target_slots: maximum number of target processes.
        spans: slots in which threads publish their span; None if not configured.
        stack_limit: size in bytes from which a stack counts as truncated.
        tables: unwind tables of user files; None if user stacks are not unwound with them.
    """

    def __init__(
        self, config: SamplerConfig, files: Files, loader: Loader, user_files: KnownFiles
    ) -> None:
        with contextlib.ExitStack() as undo:
            if config.check_kernel:
                _check_release(read_release(files))
            possible = read_possible_cpus(files)
            size = plan_ring_bytes(config, possible)
            self._targets: frozenset[int] = frozenset()
            self.target_slots = max(_TARGETS, len(config.target_pids))
            entries = {
                "cpu_lines": possible,
                "span_slots": max(1, config.span_slots),
                "targets": self.target_slots,
                "ring": size,
            }
            plan = plan_unwinding(config, files, loader.name)
            self._program, name, plan = _load(config, files, loader, entries, plan)
            program = self._program
            undo.callback(program.close)
            self.tables: TableStore | None = None
            if plan is not None:
                self.tables = open_tables(plan, config, program, files, user_files)
                undo.callback(self.tables.close)
            most = find_sysctl(files, "kernel.perf_event_max_stack") or MAX_FRAMES
            self.stack_limit = 8 * min(config.max_frames, most)
            self._pack_config = functools.partial(
                _pack_config,
                offsets=_find_task_offsets(files),
                wakeup_bytes=size // 2,
                stack_limit=self.stack_limit,
            )
            self.configure(config, 0)
            self.lines = CpuLines(program.map_fd("cpu_lines"), possible)
            undo.callback(self.lines.close)
            ring_fd = program.map_fd("ring")
            self.ring = RingReader(RingMemory(ring_fd, size), size)
            undo.callback(self.ring.close)
            self.spans = None
            if config.span_layout is not None:
                self.spans = SpanSlots(program.map_fd("span_slots"), config.span_slots)
                undo.callback(self.spans.close)
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._wake_fd)
            self._epoll = select.epoll()
            undo.callback(self._epoll.close)
            self._epoll.register(self._wake_fd, select.EPOLLIN)
            # Edge-triggered: otherwise a ring that is never empty would end every wait at once.
            self._epoll.register(ring_fd, select.EPOLLIN | select.EPOLLET)
            self.events = _events(config, files, program.program_fd(name), self.lines.runs)
            undo.callback(self.events.close)
            self.events.open()
            self._close = undo.pop_all().close

    def configure(self, config: SamplerConfig, regular_since_ns: int) -> None:
        """Configure the program's filters; takes effect at its next run.

        Args:
            config: what to sample.
            regular_since_ns: boot time from which it runs once per period on each CPU, unless
                the kernel skips a run.
        """
        wanted = frozenset(config.target_pids)
        targets = self._program.map_fd("targets")
        try:
            # Update the config between both loops, so that filtering by targets changes at once.
            for pid in wanted - self._targets:
                update_map(targets, pid.to_bytes(4, "little"), b"\1")
            packed = self._pack_config(config, regular_since_ns=regular_since_ns)
            update_map(self._program.map_fd("config"), _FIRST, packed)
            for pid in self._targets - wanted:
                delete_from_map(targets, pid.to_bytes(4, "little"))
        except OSError as error:
            raise SamplerError(f"the program could not be configured: {error}") from error
        self._targets = wanted

    def wait(self, timeout_s: float) -> None:
        """Block until the program forces a wakeup, :meth:`wake` is called, or the timeout."""
        for fd, _ in self._epoll.poll(timeout_s):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)

    def wake(self) -> None:
        """End :meth:`wait`."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close descriptors and mappings, the events first; safe in a forked child."""
        self._close()


def plan_ring_bytes(config: SamplerConfig, cpus: int) -> int:
    """Ring size: four drain intervals of 64 frames, at least 256 KiB, at most the limit."""
    record = RECORD_OVERHEAD + RECORD_HEADER_BYTES + 8 * _PLANNED_FRAMES
    rate = config.samples_per_second * (len(config.pin_cpu_ids) or cpus)
    planned = int(rate * config.drain_interval_s * record * _PLANNED_DRAINS)
    wanted = max(planned, _MIN_RING_BYTES) << config.map_scale_factor
    return min(ring_bytes(wanted), ring_bytes(config.max_ring_bytes // 2 + 1))


def _check_release(release: KernelRelease) -> None:
    if release[:2] < OLDEST_KERNEL:
        oldest = ".".join(map(str, OLDEST_KERNEL))
        raise KernelFeatureError(
            f"kernel {release.text} is too old",
            hint=f"run on {oldest} or later: older ones lack CAP_BPF or the BPF ring buffer",
        )


def _load(
    config: SamplerConfig,
    files: HostFiles,
    loader: Loader,
    entries: dict[str, int],
    plan: UnwindPlan | None,
) -> tuple[LoadedObject, str, UnwindPlan | None]:
    """The loaded object, the name of its program, and ``plan`` if that is an unwinder."""
    wanted = {**entries, **map_entries(plan, entries["cpu_lines"])}
    for name in BY_TABLES if plan else ():
        try:
            return _load_program(name, config, files, loader, wanted), name, plan
        except SamplerError as error:  # a kernel without its helpers, or another verifier
            _log.debug("%s is not accepted: %s\n%s", name, error, error.log)
    if plan:
        say_frame_pointers("this kernel does not accept the unwinder")
        wanted = {**entries, **map_entries(None, entries["cpu_lines"])}
    name = FRAME_POINTERS
    return _load_program(name, config, files, loader, wanted), name, None


def _load_program(
    name: str, config: SamplerConfig, files: HostFiles, loader: Loader, entries: dict[str, int]
) -> LoadedObject:
    spec = ObjectSpec(SAMPLER_SOURCE, SAMPLER_OBJECT, (name,), entries, config.verifier_log_level)
    try:
        return loader.load(spec)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise get_privilege_error("loading the BPF program", files) from error
        if error.errno == errno.ENOMEM:
            raise HostError(
                f"no memory for a ring of {entries['ring']} bytes",
                hint="lower samples_per_second or map_scale_factor, or raise the memory limit",
            ) from error
        raise find_open_files_error("loading the BPF program", error) or KernelFeatureError(
            f"the kernel cannot load BPF programs: {error}",
            hint="it must be built with CONFIG_BPF_SYSCALL and CONFIG_BPF_EVENTS",
        ) from error


def _pack_config(
    config: SamplerConfig,
    *,
    offsets: tuple[int, ...] | None,
    wakeup_bytes: int,
    stack_limit: int,
    regular_since_ns: int,
) -> bytes:
    flags = 0 if config.stacks == "user" else KERNEL_STACKS
    flags |= 0 if config.stacks == "kernel" else USER_STACKS
    flags |= KEEP_IDLE if config.send_idle_frames else 0
    flags |= ONLY_TARGETS if config.target_pids else 0
    flags |= SPAN_LINKS if config.span_layout else 0
    flags |= START_TIME if offsets else 0
    flags |= NAMESPACE if config.target_namespace else 0
    flags |= DESCENDANTS if config.target_descendants else 0
    flags |= A64 if platform.machine() == "aarch64" else 0
    if config.target_descendants and not offsets:
        raise KernelFeatureError(
            "following the descendants of a process needs BTF",
            hint="the kernel must be built with CONFIG_DEBUG_INFO_BTF, or profile one process",
        )
    leader, start, parent, tgid = offsets or (0, 0, 0, 0)
    device, inode = config.target_namespace or (0, _INITIAL_NAMESPACE)
    target = config.target_pids[0] if config.target_descendants else 0
    return ProgramConfig(
        flags, config.min_process_age_ns, leader, start, wakeup_bytes, stack_limit,
        config.interrupt_ranges, _kernel_device(device), inode, parent, tgid,
        target if inode == _INITIAL_NAMESPACE else 0,
        config.period_ns if config.child_pid is None else 0, regular_since_ns, config.span_layout,
    ).pack()  # fmt: skip


def _kernel_device(device: int) -> int:
    """``st_dev`` in the kernel's internal encoding (MKDEV of include/linux/kdev_t.h)."""
    return os.major(device) << 20 | os.minor(device)


def _find_task_offsets(files: HostFiles) -> tuple[int, ...] | None:
    """Offsets of leader, start time, parent and process id in a task; None without BTF."""
    try:
        btf = files.read_bytes(VMLINUX_BTF)
    except OSError:
        return None
    members = ("group_leader", "start_boottime", "real_parent", "tgid")
    return find_member_offsets(btf, "task_struct", members)


def _events(
    config: SamplerConfig, files: HostFiles, program_fd: int, runs: Callable[[int], int]
) -> Events:
    if config.child_pid is not None:
        return ChildEvents(files, program_fd, config.period_ns, config.child_pid)
    return CpuEvents(files, program_fd, config.period_ns, config.pin_cpu_ids, runs)
