"""Opens the program, maps, ring and events of a running sampler."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from otel_kprofiler.bpf import (
    EVENT_LAYOUT,
    SAMPLER_OBJECT,
    SAMPLER_SOURCE,
    TRACEPOINT,
    TRACEPOINT_PROGRAM,
    VMLINUX_BTF,
    CpuLines,
    EventOffsets,
    KernelTypes,
    LoadedObject,
    Loader,
    ObjectSpec,
    PythonMaps,
    PythonOffsets,
    ReaderFlag,
    RingMemory,
    RingReader,
    TaskOffsets,
    WaitOffsets,
    find_task_offsets,
    python_map_entries,
    set_span_path,
    update_map,
)
from otel_kprofiler.errors import KernelFeatureError, SamplerError
from otel_kprofiler.host import (
    OLDEST_KERNEL,
    EventSpec,
    HostFiles,
    KernelRelease,
    ReferableFiles,
    find_sysctl,
    read_possible_cpus,
    read_release,
)
from otel_kprofiler.model import MAX_FRAMES, KnownCodes, KnownFiles
from otel_kprofiler.sampling.host_events import choose_events, plan_events
from otel_kprofiler.sampling.loading import find_offsets, load_spec
from otel_kprofiler.sampling.locks import (
    LOCK_PROGRAMS,
    LockPlan,
    lock_map_entries,
    open_locks,
    plan_locks,
)
from otel_kprofiler.sampling.program_config import pack_config
from otel_kprofiler.sampling.python_frames import (
    PYTHON_SUFFIX,
    describe_problem,
    open_python,
    plan_python,
    python_ring_bytes,
)
from otel_kprofiler.sampling.record_waiter import RecordWaiter
from otel_kprofiler.sampling.ring_size import plan_ring_bytes
from otel_kprofiler.sampling.sampler import SamplerConfig
from otel_kprofiler.sampling.target_maps import TargetMaps, check_cgroups, target_map_entries
from otel_kprofiler.sampling.thread_contexts import (
    context_map_entries,
    open_contexts,
    plan_contexts,
)
from otel_kprofiler.sampling.tracepoints import TracepointPlan, open_tracepoints, plan_tracepoints
from otel_kprofiler.sampling.unwinder import (
    BY_TABLES,
    FRAME_POINTERS,
    LIST_FILES,
    UnwindPlan,
    map_entries,
    open_tables,
    plan_unwinding,
    say_frame_pointers,
    unwind_choices,
)
from otel_kprofiler.sampling.wait_follower import (
    open_waits,
    plan_waits,
    wait_constants,
    wait_map_entries,
    wait_programs,
)

if TYPE_CHECKING:
    from otel_kprofiler.unwinding import TableStore

_FIRST = bytes(4)  # the only index of a one-element array

_log = logging.getLogger(__name__)


class Attachment:
    """A loaded sampling program with its maps and events; the constructor opens all of them.

    Attributes:
        follows_spans: whether the current span is read from this process's interpreter.
        stack_limit: minimum size, in bytes, of a stack that is counted as truncated.
        tables: unwind tables for user-space binaries; None if unwinding uses no tables.
        python: processes whose Python frames are read; None if Python frames are not read.
        python_problem: why Python frames are not read although they are configured.
        contexts: processes whose thread contexts are read.
        waits: programs that track off-CPU threads; None unless configured.
        tracepoints: programs at raw tracepoints; None unless configured.
        locks: programs for lock contention; None unless configured.
    """

    def __init__(
        self,
        config: SamplerConfig,
        files: ReferableFiles,
        loader: Loader,
        user_files: KnownFiles,
        python_codes: KnownCodes,
    ) -> None:
        with contextlib.ExitStack() as undo:
            if config.check_kernel:
                _check_release(read_release(files))
            possible = read_possible_cpus(files)
            size = plan_ring_bytes(config, possible)
            if config.target_cgroups:
                check_cgroups(files, loader.name)
            plans = _plan(config, files, loader.name)
            entries = {
                "cpu_lines": possible * (1 + len(config.events)),
                "ring": size,
                "traced_cpus": possible if plans.has_tracepoints else 1,
                **target_map_entries(config),
                **wait_map_entries(plans.waits, files, possible),
                **lock_map_entries(plans.locks, possible),
            }
            self.target_slots = entries["targets"]
            program, choice, spec = _load(
                config, files, loader, cpus=possible, entries=entries, plans=plans
            )
            self._program = program
            undo.callback(program.close)
            self._targets = TargetMaps(program.map_fd)
            self.tables: TableStore | None = None
            if choice.unwinding is not None:
                self.tables = open_tables(choice.unwinding, config, program, files, user_files)
                undo.callback(self.tables.close)
            self.python: PythonMaps | None = None
            if choice.python is not None:
                self.python = open_python(choice.python, config, program, possible, python_codes)
                undo.callback(self.python.close)
            self.python_problem = describe_problem(plans.python, choice.python, plans.problem)
            self.stack_limit = _find_stack_limit(config, files)
            self._pack_config = functools.partial(
                pack_config,
                offsets=plans.task,
                thread_pointer=plans.thread_pointer,
                wakeup_bytes=size // 2,
                stack_limit=self.stack_limit,
            )
            self.configure(config, 0)
            self.lines = CpuLines(program.map_fd("cpu_lines"), possible, len(config.events))
            undo.callback(self.lines.close)
            ring_fd = program.map_fd("ring")
            self.ring = RingReader(RingMemory(ring_fd, size), size)
            undo.callback(self.ring.close)
            self.knows_start_times = plans.task is not None
            self.follows_spans = _follow_spans(program, config, loader.name)
            self.reads_contexts = plans.thread_pointer > 0
            self.contexts = undo.enter_context(
                contextlib.closing(open_contexts(plans.thread_pointer, program))
            )
            flag = undo.enter_context(contextlib.closing(ReaderFlag(program.map_fd("reader"))))
            self.waiter = RecordWaiter(self.ring, ring_fd, self.lines, flag)
            undo.callback(self.waiter.close)
            self.tracepoints = undo.enter_context(
                open_tracepoints(
                    plans.tracepoints,
                    program,
                    lambda plan: load_spec(
                        _add_tracepoint(spec._replace(programs=(), maps_of=program), plan, choice),
                        files,
                        loader,
                    ),
                    files=files,
                    possible=possible,
                    cpus=config.pin_cpu_ids,
                )
            )
            self.locks = undo.enter_context(
                open_locks(
                    plans.locks, program, files=files, possible=possible, cpus=config.pin_cpu_ids
                )
            )
            program_fd = program.program_fd(choice.name) if config.needs_perf_events else -1
            self.events = choose_events(
                config, files, program_fd, self.lines.runs, (self.tracepoints, self.locks)
            )
            undo.callback(self.events.close)
            waits = wait_programs(config, choice.name)
            self.waits = undo.enter_context(
                open_waits(plans.waits, program, waits, config=config, files=files, entries=entries)
            )
            self.events.open()
            self._close = undo.pop_all().close

    def configure(self, config: SamplerConfig, regular_since_ns: int) -> None:
        """Configure the program's filters. The change takes effect the next time the program runs.

        ``regular_since_ns`` is the ``CLOCK_BOOTTIME`` from which the program runs once per period
        on each CPU, unless the kernel skips runs. Raises ``SamplerError``.
        """
        packed = self._pack_config(config, regular_since_ns=regular_since_ns)
        try:
            self._targets.change(
                config, lambda: update_map(self._program.map_fd("config"), _FIRST, packed)
            )
            if self.python is not None:
                self.python.limit(config.python_frames)
        except OSError as error:
            raise SamplerError(f"the BPF program could not be configured: {error}") from error

    def retarget(self, config: SamplerConfig) -> None:
        """Change only the target processes. Raises ``SamplerError``."""
        try:
            self._targets.change(config)
        except OSError as error:
            raise SamplerError(f"the BPF program could not be configured: {error}") from error

    def close(self) -> None:
        """Close descriptors and mappings, events first. Safe to call in a forked child."""
        self._close()


def _find_stack_limit(config: SamplerConfig, files: HostFiles) -> int:
    most = find_sysctl(files, "kernel.perf_event_max_stack") or MAX_FRAMES
    return 8 * min(config.max_frames, most)


def _follow_spans(program: LoadedObject, config: SamplerConfig, loader: str) -> bool:
    """Configure the program to read the current span from the interpreter, if possible."""
    if config.span_path is None or config.span_layout is None or loader != "libbpf":
        return False
    set_span_path(program.map_fd("span_path"), config.span_path)
    return True


def _check_release(release: KernelRelease) -> None:
    if release[:2] < OLDEST_KERNEL:
        oldest = ".".join(map(str, OLDEST_KERNEL))
        raise KernelFeatureError(
            f"kernel {release.text} is too old",
            hint=f"use Linux {oldest} or later: older kernels lack CAP_BPF or the BPF ring buffer",
        )


class _Choice(NamedTuple):
    """The name of a BPF program in the object file, and the plans that it implements."""

    name: str
    unwinding: UnwindPlan | None
    python: PythonOffsets | None


class _Plans(NamedTuple):
    """Plans for unwinding, Python frames, waits, events and task identity.

    ``problem`` is the reason why there are no Python frames. ``thread_pointer`` is the offset of
    the thread pointer in ``task_struct``; 0 if thread contexts are not read.
    """

    unwinding: UnwindPlan | None
    python: PythonOffsets | None
    problem: str | None
    waits: WaitOffsets | None
    task: TaskOffsets | None
    thread_pointer: int
    events: EventOffsets | None
    tracepoints: list[TracepointPlan]
    locks: LockPlan | None

    @property
    def has_tracepoints(self) -> bool:
        """Returns whether programs run at raw tracepoints other than those for waits."""
        return bool(self.tracepoints or self.locks)


def _plan(config: SamplerConfig, files: HostFiles, loader: str) -> _Plans:
    # Parsing the kernel's BTF (several MB) takes 20 ms, so the BTF is parsed at most once.
    read_types = functools.cache(lambda: KernelTypes(files.read_bytes(VMLINUX_BTF)))
    return _Plans(
        plan_unwinding(config, read_types, loader),
        *plan_python(config, read_types, loader),
        plan_waits(config, read_types, loader),
        # Without the task offsets, processes can be distinguished only through /proc.
        find_offsets(find_task_offsets, read_types),
        plan_contexts(read_types),
        plan_events(config, read_types, loader),
        plan_tracepoints(config, read_types, files),
        plan_locks(config, read_types),
    )


def _load(
    config: SamplerConfig,
    files: HostFiles,
    loader: Loader,
    *,
    cpus: int,
    entries: Mapping[str, int],
    plans: _Plans,
) -> tuple[LoadedObject, _Choice, ObjectSpec]:
    """Load the most capable program that this kernel accepts."""
    choices = [
        _Choice(name + PYTHON_SUFFIX if offsets else name, plan, offsets)
        for plan in unwind_choices(plans.unwinding)
        for offsets in ((plans.python, None) if plans.python else (None,))
        for name in (BY_TABLES if plan else (FRAME_POINTERS,))
    ]
    for choice in choices:
        spec = _make_spec(choice, config=config, cpus=cpus, entries=entries, plans=plans)
        try:
            loaded = load_spec(spec, files, loader)
        except SamplerError as error:  # the kernel lacks a helper or rejects the code
            if choice is choices[-1]:
                raise
            _log.debug("the kernel rejected %s: %s\n%s", choice.name, error, error.log)
        else:
            break
    if plans.unwinding and not choice.unwinding:
        say_frame_pointers("this kernel does not accept the unwinder")
    return loaded, choice, spec


def _make_spec(
    choice: _Choice, *, config: SamplerConfig, cpus: int, entries: Mapping[str, int], plans: _Plans
) -> ObjectSpec:
    python_ring = python_ring_bytes(config) if choice.python else 0
    sizes = {
        **entries,
        **context_map_entries(plans.thread_pointer),
        **map_entries(choice.unwinding, cpus),
        **python_map_entries(cpus, python_ring),
    }
    programs: tuple[str, ...] = (choice.name,) if config.needs_perf_events else ()
    programs += wait_programs(config, choice.name)
    programs += LOCK_PROGRAMS if plans.locks else ()
    if choice.unwinding and choice.unwinding.lists_files:
        programs += (LIST_FILES,)
    spec = ObjectSpec(
        SAMPLER_SOURCE,
        SAMPLER_OBJECT,
        programs,
        sizes,
        config.verifier_log_level,
        wait_constants(plans.waits, entries)
        | _event_constants(plans, config, cpus)
        | (plans.locks.constants(choice.name) if plans.locks else {}),
    )
    return _add_tracepoint(spec, plans.tracepoints[0], choice) if plans.tracepoints else spec


def _event_constants(plans: _Plans, config: SamplerConfig, cpus: int) -> dict[str, bytes]:
    if plans.events is None:
        return {}
    has_hardware = any(isinstance(spec, EventSpec) and spec.is_hardware for spec in config.events)
    may_nest = plans.has_tracepoints or (has_hardware and plans.waits is not None)
    return {EVENT_LAYOUT: plans.events.pack(cpus, may_nest=may_nest)}


def _add_tracepoint(spec: ObjectSpec, plan: TracepointPlan, choice: _Choice) -> ObjectSpec:
    return spec._replace(
        programs=(*spec.programs, TRACEPOINT_PROGRAM),
        constants={**spec.constants, TRACEPOINT: plan.pack(choice.name)},
    )
