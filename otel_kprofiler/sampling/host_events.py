"""Combines all perf events and tracepoints that trigger programs on the CPUs of this host."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from otel_kprofiler.bpf import EventOffsets, KernelTypes, find_event_offsets
from otel_kprofiler.host import EventSpec, HostFiles
from otel_kprofiler.sampling.events import ChildEvents, CpuEvents, Events, PerCpuEvents
from otel_kprofiler.sampling.loading import get_offsets, require_libbpf
from otel_kprofiler.sampling.sampler import SamplerConfig


class EventSet(Events, Protocol):
    """One or more perf events or tracepoints on the CPUs of this host; see :class:`HostEvents`."""

    @property
    def cpus(self) -> tuple[int, ...]:
        """Returns the CPUs being sampled."""

    def pause(self) -> None:
        """Stop sampling until :meth:`resume`."""

    def resume(self) -> None:
        """Resume sampling after :meth:`pause`."""

    def check(self, cpus: Iterable[int]) -> None:
        """Raise ``HostError`` if none of ``cpus`` is online. An empty ``cpus`` means all CPUs."""

    def select(self, cpus: Iterable[int]) -> None:
        """Sample only the given CPUs. CPUs that are already being sampled are not interrupted."""


class HostEvents:
    """All configured events, including cpu-clock if on-CPU samples are taken.

    ``clock`` is None if no on-CPU samples are taken.
    """

    def __init__(self, clock: CpuEvents | None, others: Sequence[EventSet]) -> None:
        self._clock = clock
        self._sets: list[EventSet] = [*([clock] if clock else []), *others]

    @property
    def cpus(self) -> tuple[int, ...]:
        """Returns the CPUs being sampled."""
        return self._sets[0].cpus if self._sets else ()

    def open(self) -> None:
        """Open, attach and enable all events, or raise ``HostError``."""
        for events in self._sets:
            events.open()

    def follow(self) -> None:
        """Adapt to CPU hotplug."""
        for events in self._sets:
            events.follow()

    def disable(self) -> None:
        """Disable all events. Once this method returns, the programs no longer run."""
        for events in self._sets:
            events.disable()

    def pause(self) -> None:
        """Stop sampling until :meth:`resume`."""
        for events in self._sets:
            events.pause()

    def resume(self) -> None:
        """Resume sampling after :meth:`pause`."""
        for events in self._sets:
            events.resume()

    def check(self, cpus: Iterable[int]) -> None:
        """Raise ``HostError`` if none of ``cpus`` is online. An empty ``cpus`` means all CPUs."""
        for events in self._sets[:1]:
            events.check(cpus)

    def select(self, cpus: Iterable[int]) -> None:
        """Sample only these CPUs. CPUs that are already sampled are not interrupted."""
        for events in self._sets:
            events.select(cpus)

    def set_period(self, period_ns: int, now_ns: Callable[[], int]) -> int:
        """Change the interval between on-CPU samples; see :meth:`CpuEvents.set_period`."""
        return self._clock.set_period(period_ns, now_ns) if self._clock else now_ns()

    def between_samples(self, action: Callable[[], None]) -> None:
        """Run a function just after an on-CPU sample; see :meth:`CpuEvents.between_samples`."""
        if self._clock:
            self._clock.between_samples(action)
        else:
            action()

    def close(self) -> None:
        """Close only the descriptors, so that a forked child may call this method."""
        with contextlib.ExitStack() as stack:
            for events in self._sets:
                stack.callback(events.close)


def plan_events(
    config: SamplerConfig, read_types: Callable[[], KernelTypes], loader: str
) -> EventOffsets | None:
    """Returns the kernel offsets that the events' program needs; None if there are no events.

    Raises ``HostError`` if the events cannot be sampled on this host.
    """
    if not config.events:
        return None
    names = " and ".join(event.name for event in config.events)
    require_libbpf(loader, f"the loader {loader} cannot load the program for {names}")
    message = f"sampling {names} needs BTF, which this kernel lacks"
    return get_offsets(find_event_offsets, read_types, message, "sample cpu-clock")


def choose_events(
    config: SamplerConfig,
    files: HostFiles,
    program_fd: int,
    runs: Callable[..., int],
    traced: Iterable[EventSet | None],
) -> Events:
    """Returns the configured events, without opening them.

    ``runs`` returns how many times the program has run on a CPU, for cpu-clock or for a numbered
    event. ``traced`` contains the programs for raw tracepoints, one entry per kind; None entries
    are skipped.
    """
    if config.child_pid is not None:
        return ChildEvents(files, program_fd, config.period_ns, config.child_pid)
    clock = None
    if config.on_cpu:
        clock = CpuEvents(files, program_fd, config.period_ns, config.pin_cpu_ids, runs)
    # Events are numbered from 1, and the BPF program reads an event's number from its attributes.
    others: list[EventSet] = [
        PerCpuEvents(
            files,
            program_fd,
            spec.attributes._replace(wakeup=number),
            config.pin_cpu_ids,
            functools.partial(runs, event=number),
            name=spec.name,
        )
        for number, spec in enumerate(config.events, 1)
        if isinstance(spec, EventSpec)
    ]
    return HostEvents(clock, [*others, *filter(None, traced)])
