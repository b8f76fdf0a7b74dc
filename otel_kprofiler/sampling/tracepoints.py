"""Plans sampling at raw tracepoints, and attaches the programs to them."""

import contextlib
import difflib
import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from otel_kprofiler.bpf import (
    MAX_ARGUMENTS,
    TRACEPOINT_PROGRAM,
    VMLINUX_BTF,
    KernelTypes,
    LoadedObject,
    TracedCpus,
    TracepointConstants,
    TracepointValue,
    attach_tracepoint,
    count_recursions,
    list_tracepoints,
)
from otel_kprofiler.errors import HostError, KernelFeatureError
from otel_kprofiler.host import (
    HostFiles,
    TracepointSpec,
    ValueSource,
    get_privilege_error,
    read_online_cpus,
    suggest_events,
)
from otel_kprofiler.sampling.events import check_online
from otel_kprofiler.sampling.python_frames import PYTHON_SUFFIX
from otel_kprofiler.sampling.sampler import SamplerConfig
from otel_kprofiler.sampling.unwinder import BY_TABLES, FRAME_POINTERS

_BTF_DIRECTORY: Final = os.path.dirname(VMLINUX_BTF)
_MOST_SUGGESTIONS: Final = 5


class TracepointPlan(NamedTuple):
    """A plan for sampling at a tracepoint; ``number`` is the event's number, starting at 1."""

    spec: TracepointSpec
    number: int
    value: TracepointValue

    def pack(self, program: str) -> bytes:
        """Packs the constants for a program that collects the same stacks as ``program``."""
        collects = program.removesuffix(PYTHON_SUFFIX)
        return TracepointConstants(
            self.number,
            self.spec.period,
            (FRAME_POINTERS, *BY_TABLES).index(collects),  # enum user_frames
            collects != program,
            self.value,
            self.spec.call,
        ).pack()


def plan_tracepoints(
    config: SamplerConfig, read_types: Callable[[], KernelTypes], files: HostFiles
) -> list[TracepointPlan]:
    """Plans sampling at the configured tracepoints.

    Raises ``HostError`` if the kernel lacks a tracepoint, or if the value of its events cannot be
    located, and ``OSError`` if the kernel has no BTF.
    """
    return [
        TracepointPlan(event, number, _find_value(event, read_types(), files))
        for number, event in enumerate(config.events, 1)
        if isinstance(event, TracepointSpec)
    ]


def _find_value(spec: TracepointSpec, types: KernelTypes, files: HostFiles) -> TracepointValue:
    arguments = types.arguments(spec.tracepoint)
    if arguments is None and spec.tracepoint not in _list_modules_tracepoints(files):
        raise _unknown(spec.name, files)
    if spec.value is None:
        return TracepointValue()
    value = _locate(spec.value, arguments or (), types)
    if value is None:
        raise KernelFeatureError(
            f"the value of {spec.name} events cannot be located on this kernel",
            hint="report it with the output of uname -a",
        )
    return value


def _locate(
    source: ValueSource, arguments: Sequence[str], types: KernelTypes
) -> TracepointValue | None:
    places = [number for number, name in enumerate(arguments) if name == source.type]
    member = types.offset(source.type, *source.member.split(".")) if source.member else None
    if len(places) <= source.place or places[source.place] >= MAX_ARGUMENTS:
        return None
    if source.member and member is None:
        return None
    unit = mmap.PAGESIZE if source.is_order else 1
    return TracepointValue(places[source.place], member, source.is_order, unit)


def _list_modules_tracepoints(files: HostFiles) -> set[str]:
    try:
        paths = [f"{_BTF_DIRECTORY}/{name}" for name in files.list_dir(_BTF_DIRECTORY)]
    except OSError:
        return set()
    names: set[str] = set()
    for path in paths:
        with contextlib.suppress(OSError):  # the module has been unloaded
            names |= list_tracepoints(files.read_bytes(path)) if path != VMLINUX_BTF else set()
    return names


def _unknown(name: str, files: HostFiles) -> HostError:
    names = list_tracepoints(files.read_bytes(VMLINUX_BTF)) | _list_modules_tracepoints(files)
    ends = [other for other in names if name.endswith(f"_{other}")]
    near = [*suggest_events(name), *sorted(ends, key=len, reverse=True)]
    near += difflib.get_close_matches(name, names)
    near += sorted((other for other in names if name in other), key=len)
    suggestions = list(dict.fromkeys(near))[:_MOST_SUGGESTIONS]
    hint = (
        f"similar names: {', '.join(suggestions)}"
        if suggestions
        else "list all events with `record -e help`"
    )
    return HostError(f"no event or tracepoint is named {name}", hint=hint)


class TracedPrograms:
    """The BPF programs attached to raw tracepoints; not thread-safe.

    Args:
        traced: CPUs on which the programs take samples.
        cpus: CPUs to sample; empty means all.
    """

    def __init__(
        self, files: HostFiles, traced: TracedCpus, possible: int, cpus: Iterable[int]
    ) -> None:
        self._files = files
        self._traced = traced
        self._every_cpu = frozenset(range(possible))
        self._wanted = frozenset(cpus)
        self._paused = False
        self._links: list[int] = []

    @property
    def cpus(self) -> tuple[int, ...]:
        """Returns the CPUs being sampled."""
        return tuple(sorted(self._chosen & read_online_cpus(self._files)))

    def _start(self) -> None:
        self.check(self._wanted)
        self._traced.change(self._chosen)

    def _attach(self, tracepoint: str, program_fd: int, name: str) -> None:
        try:
            self._links.append(attach_tracepoint(tracepoint, program_fd))
        except OSError as error:
            raise self._convert(error, name) from error

    def follow(self) -> None:
        """Does nothing by default; subclasses may read counters from the kernel."""

    def disable(self) -> None:
        """Detach the programs."""
        self.follow()
        self.close()

    def pause(self) -> None:
        """Stop sampling until :meth:`resume`."""
        self._paused = True
        self._traced.change(())

    def resume(self) -> None:
        """Resume sampling after :meth:`pause`."""
        self._paused = False
        self._traced.change(self._chosen)

    def check(self, cpus: Iterable[int]) -> None:
        """Raise ``HostError`` if none of ``cpus`` is online. An empty ``cpus`` means all CPUs."""
        check_online(cpus, self._files)

    def select(self, cpus: Iterable[int]) -> None:
        """Sample only these CPUs."""
        self._wanted = frozenset(cpus)
        if not self._paused:
            self._traced.change(self._chosen)

    def close(self) -> None:
        """Close only the descriptors, so that a forked child can call this method."""
        while self._links:
            os.close(self._links.pop())

    @property
    def _chosen(self) -> frozenset[int]:
        return self._wanted or self._every_cpu

    def _convert(self, error: OSError, name: str) -> HostError:
        if error.errno in (errno.EPERM, errno.EACCES):
            return get_privilege_error(f"attaching a program to {name}", self._files)
        return KernelFeatureError(
            f"attaching a program to {name} failed: {error.strerror}",
            hint="choose another event: `record -e help` lists some",
        )


class Tracepoints(TracedPrograms):
    """The programs at all configured tracepoints, each loaded separately; not thread-safe.

    Attributes:
        missed: the number of skipped samples by event number, as of the last :meth:`follow`.
    """

    def __init__(
        self,
        files: HostFiles,
        programs: Mapping[TracepointPlan, LoadedObject],
        traced: TracedCpus,
        possible: int,
        cpus: Iterable[int],
    ) -> None:
        super().__init__(files, traced, possible, cpus)
        self._programs = programs
        self.missed: dict[int, int] = {}

    def open(self) -> None:
        """Attach all programs, or raise ``HostError``."""
        self._start()
        for plan, program in self._programs.items():
            program_fd = program.program_fd(TRACEPOINT_PROGRAM)
            self._attach(plan.spec.tracepoint, program_fd, plan.spec.name)

    def follow(self) -> None:
        """Update the counts of samples that the kernel skipped."""
        for plan, program in self._programs.items():
            recursions = count_recursions(program.program_fd(TRACEPOINT_PROGRAM))
            self.missed[plan.number] = recursions // plan.spec.period


@contextlib.contextmanager
def open_tracepoints(
    plans: Sequence[TracepointPlan],
    first: LoadedObject,
    load: Callable[[TracepointPlan], LoadedObject],
    *,
    files: HostFiles,
    possible: int,
    cpus: Iterable[int],
) -> Iterator[Tracepoints | None]:
    """Keeps tracepoint programs loaded during a ``with`` block; yields None if ``plans`` is empty.

    ``first`` is the program loaded for the first tracepoint. ``load`` loads the program of another
    tracepoint; all programs share the maps of ``first``.
    """
    if not plans:
        yield None
        return
    with contextlib.ExitStack() as stack:
        programs = {plans[0]: first}
        for plan in plans[1:]:
            programs[plan] = stack.enter_context(contextlib.closing(load(plan)))
        traced = TracedCpus(first.map_fd("traced_cpus"), possible)
        stack.callback(traced.close)
        tracepoints = Tracepoints(files, programs, traced, possible, cpus)
        stack.callback(tracepoints.close)
        yield tracepoints
