"""Defines the interface, settings and counters for samplers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

from otel_kprofiler.bpf import (
    DEFAULT_MAX_WORK,
    MAX_CGROUP_LEVEL,
    MAX_INTERRUPT_RANGES,
    SpanLayout,
    SpanPath,
)
from otel_kprofiler.host import MAX_EVENTS, AnyEventSpec, EventSpec
from otel_kprofiler.model import (
    KINDS,
    MAX_FRAMES,
    PYTHON_FRAMES,
    LockTotal,
    LossCause,
    ProcessKey,
    ProfileKind,
    RawSample,
    WaitTotals,
)
from otel_kprofiler.sampling.off_cpu import OffCpuConfig

MAX_SAMPLES_PER_SECOND: Final = 10_000
MAX_RING_BYTES: Final = 1 << 30
_NS_PER_S: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    """The settings for a sampler.

    Attributes:
        samples_per_second: on-CPU sampling rate on each CPU, 1 to 10000.
        stacks: stacks to collect. With ``kernel`` or ``user``, samples without a frame in that
            stack are dropped.
        max_frames: maximum number of frames in a kernel or user stack, 1 to 127.
        user_unwinding: how to unwind user stacks. ``auto`` uses the files' unwind tables where
            supported and frame pointers elsewhere; ``frame_pointers`` works only for code built
            with frame pointers.
        max_unwind_work: maximum number of work units for unwinding a user stack in interrupt
            context. 1000 units take at most 25 µs, and a cached frame costs 15 units.
        max_tables_bytes: maximum kernel memory for unwind tables.
        max_table_bytes: maximum size of a file's unwind table. Tables above this size are not used.
        max_preload_s: time limit, in seconds, for loading running programs' tables before the first
            sample. The time limit is extended by up to 50 % if listing the programs takes too long.
            If 0, tables are loaded on demand, which is too late for the first sample that requires
            a table.
        preload_paths: additional files whose tables are loaded before the first sample, such as
            those of a command that starts later (:meth:`HeldCommand.find_files`).
        python_frames: maximum number of Python frames in stacks from registered processes
            (:class:`PythonMaps`), 0 to 127. If 0, no Python frames are read.
        pin_cpu_ids: CPUs to sample; empty for all.
        send_idle_frames: whether to also sample the idle task itself.
        target_pids: processes to sample (thread group ids); empty for all.
        target_comms: thread or process names to sample; empty for all. A process's name is that of
            its main thread. Only the first 15 bytes of a name are compared. Process names require
            BTF.
        target_cgroups: v2 cgroups to sample, with their descendants; empty for all. Each cgroup is
            a tuple of the depth below the root, 1 to 15, and the inode number. Requires libbpf.
        min_process_age_ns: minimum age of sampled processes. Without BTF, ages are
            unknown, and all processes are sampled.
        max_ring_bytes: maximum ring size, regardless of other settings.
        map_scale_factor: exponent of the power of 2 by which the computed ring size is multiplied.
        drain_interval_s: intended interval between calls to ``drain``.
        interrupt_ranges: half-open address ranges of interrupt entry code
            (``__irqentry_text_start`` and so on). Idle-task samples with a frame in one of these
            ranges belong to an interrupt and are kept. If ``interrupt_ranges`` is empty, all
            samples of the idle task are dropped.
        span_layout: layout of this process's span contexts; None if samples are not linked to
            spans.
        span_path: path to the current span of each thread in this process; used only if the loader
            supports the BPF program that reads spans. If the loader does not support the program,
            spans are read from thread contexts.
        target_namespace: pid namespace of ``target_pids`` and of the ids in samples, as device and
            inode of ``/proc/self/ns/pid``; None for the initial namespace. Samples from processes
            outside ``target_namespace`` contain ids in the initial namespace.
        target_descendants: whether to also sample the descendants of ``target_pids``, except
            orphans. Requires BTF.
        child_pid: process to track, with all its descendants, from its next exec on; None to sample
            CPUs (see :class:`HeldCommand`).
        check_kernel: whether to reject old kernels without trying to load the program.
        verifier_log_level: log level of the kernel's verifier, 0 to 2. The verifier's output is
            logged at level INFO.
        off_cpu: how waits are sampled; None if waits are not sampled.
        events: other perf events and tracepoints to sample, at most 16. Each event becomes a
            separate sample kind. Requires libbpf and BTF.
    """

    samples_per_second: int = 19
    stacks: Literal["kernel", "user", "both"] = "kernel"
    max_frames: int = MAX_FRAMES
    user_unwinding: Literal["auto", "frame_pointers"] = "auto"
    max_unwind_work: int = DEFAULT_MAX_WORK
    max_tables_bytes: int = 64 << 20
    max_table_bytes: int = 40 << 20
    max_preload_s: float = 5.0
    preload_paths: tuple[str, ...] = ()
    python_frames: int = PYTHON_FRAMES
    pin_cpu_ids: tuple[int, ...] = ()
    send_idle_frames: bool = False
    target_pids: tuple[int, ...] = ()
    target_comms: tuple[bytes, ...] = ()
    target_cgroups: tuple[tuple[int, int], ...] = ()
    min_process_age_ns: int = 0
    max_ring_bytes: int = MAX_RING_BYTES
    map_scale_factor: int = 0
    drain_interval_s: float = 0.25
    interrupt_ranges: tuple[tuple[int, int], ...] = ()
    span_layout: SpanLayout | None = None
    span_path: SpanPath | None = None
    target_namespace: tuple[int, int] | None = None
    target_descendants: bool = False
    child_pid: int | None = None
    check_kernel: bool = True
    verifier_log_level: int = 0
    on_cpu: bool = True
    off_cpu: OffCpuConfig | None = None
    events: tuple[AnyEventSpec, ...] = ()

    def __post_init__(self) -> None:
        for name, low, high in (
            ("samples_per_second", 1, MAX_SAMPLES_PER_SECOND),
            ("max_frames", 1, MAX_FRAMES),
            ("max_unwind_work", 100, 1_000_000),
            ("python_frames", 0, MAX_FRAMES),
            ("map_scale_factor", 0, 8),
            ("verifier_log_level", 0, 2),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must be between {low} and {high}")
        if self.target_descendants and not self.target_pids:
            raise ValueError("target_descendants needs target_pids")
        if any(not 1 <= level <= MAX_CGROUP_LEVEL for level, _ in self.target_cgroups):
            raise ValueError(
                f"a cgroup must be between 1 and {MAX_CGROUP_LEVEL} levels below the root"
            )
        if not self.on_cpu and self.off_cpu is None and not self.events:
            raise ValueError("there is nothing to sample: enable on_cpu, off_cpu or events")
        if self.child_pid is not None and (self.off_cpu is not None or self.events):
            raise ValueError(
                "child_pid cannot be combined with off_cpu or events: use target_pids instead"
            )
        if len(self.events) > MAX_EVENTS:
            raise ValueError(f"there are {len(self.events)} events; the maximum is {MAX_EVENTS}")
        if len({event.kind.name for event in self.events}) < len(self.events):
            raise ValueError("two events have the same name: specify each event only once")
        if len(self.interrupt_ranges) > MAX_INTERRUPT_RANGES:
            raise ValueError(f"interrupt_ranges has more than {MAX_INTERRUPT_RANGES} ranges")

    @property
    def period_ns(self) -> int:
        """Returns the sampling period on each CPU in nanoseconds."""
        return _NS_PER_S // self.samples_per_second

    @property
    def targets(self) -> tuple[object, ...]:
        """Returns the settings that select the sampled processes."""
        return self.target_pids, self.target_descendants, self.target_comms, self.target_cgroups

    @property
    def needs_perf_events(self) -> bool:
        """Returns whether samples are triggered by perf events, including cpu-clock."""
        return self.on_cpu or any(isinstance(event, EventSpec) for event in self.events)

    @property
    def kinds(self) -> tuple[ProfileKind, ...]:
        """Returns the kinds of samples that may occur, in the order of a window's profiles."""
        return (*KINDS, *(event.kind for event in self.events))


class SamplerCounts(NamedTuple):
    """Cumulative counts of a sample kind, from the start of sampling to the last ``drain``.

    Attributes:
        taken: samples that passed all filters, counted by the BPF program.
        lost: samples that could not be delivered, by cause, counted by the BPF program.
        received: samples returned by ``drain``; ``taken`` is ``received`` plus the sum of ``lost``.
        filtered: dropped samples, by filter: ``idle`` (the idle task itself), ``target``, ``age``,
            or ``empty`` (no frame in the only collected stack).
        missed: samples that the kernel skipped; not included in ``taken``. The kernel skips a
            sample if the CPU is running another BPF program or bpf(2), has interrupts off, or is
            preempted by its hypervisor. Always 0 if a command is tracked.
        truncated: received samples with an incomplete user stack, by the name of its
            :class:`StackEnd`.
        locks: totals for all lock waits, if lock waits are sampled.
    """

    taken: int
    lost: Mapping[LossCause, int]
    received: int
    filtered: Mapping[str, int]
    missed: int = 0
    truncated: Mapping[str, int] = {}
    locks: Mapping[str, LockTotal] = {}


class Sampler(Protocol):
    """A source of samples. Only :meth:`wake` and :meth:`counts` are thread-safe."""

    @property
    def period_ns(self) -> int:
        """Returns the per-CPU sampling period in nanoseconds, for kinds that have a period."""

    @property
    def kinds(self) -> tuple[ProfileKind, ...]:
        """Returns the kinds of samples that may occur, in the order of a window's profiles."""

    def start(self) -> None:
        """Start sampling. Raises ``HostError`` or ``SamplerError``, leaving no resources open."""

    def wait(self, timeout_s: float) -> None:
        """Block until the ring is half full, :meth:`wake` is called, or the timeout expires."""

    def wait_new(self, least_s: float, most_s: float) -> None:
        """Block until there is a sample from a process that started after the last :meth:`drain`.

        Allows the caller to identify a new process while the process is still running. Blocks for
        at least ``least_s`` and at most ``most_s`` seconds, unless the ring is half full or
        :meth:`wake` is called.
        """

    def wait_first(self, timeout_s: float) -> bool:
        """Block until a sample is ready, :meth:`wake` is called, or ``timeout_s`` expires.

        Returns False after :meth:`wake` or the timeout, and True otherwise.
        """

    def wake(self) -> None:
        """End the current or next ``wait`` call. Safe to call from any thread or signal handler."""

    def drain(self) -> list[RawSample]:
        """Returns all samples that are ready; never blocks. Also handles CPU hotplug."""

    def complete_until_ns(self) -> int:
        """Returns the ``CLOCK_BOOTTIME`` before which :meth:`drain` has returned every sample."""

    def read_waits(self) -> Mapping[ProcessKey, WaitTotals]:
        """Returns each process's off-CPU time since the previous call.

        The totals are exact, and include the elapsed part of ongoing waits. Processes without waits
        are absent. The result is empty if waits are not tracked. Call this method once per window.
        """

    @property
    def wait_threshold_ns(self) -> int:
        """Returns the duration above which every wait is sampled; 0 if no waits are sampled."""

    def counts(self) -> Mapping[str, SamplerCounts]:
        """Returns the counters by kind name, as of the last :meth:`drain`.

        Thread-safe, even after :meth:`close`.
        """

    def stop(self) -> None:
        """Stop sampling. A last :meth:`drain` returns the remaining samples."""

    def close(self) -> None:
        """Release all resources; idempotent."""
