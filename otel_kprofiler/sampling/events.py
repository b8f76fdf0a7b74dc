"""Opens the perf events that trigger the sampling program."""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, Protocol

from otel_kprofiler.errors import HostError, KernelFeatureError, describe_error
from otel_kprofiler.host import (
    COUNT_SW_CPU_CLOCK,
    CPU_CLOCK,
    DISABLED,
    ENABLE_ON_EXEC,
    INHERIT,
    TIME_ENABLED,
    EventPerCpu,
    HostFiles,
    PerfAttributes,
    attach_program,
    disable_event,
    enable_event,
    find_event_error,
    find_open_files_error,
    find_throttling,
    get_privilege_error,
    get_tick_rate,
    open_perf_event,
    read_online_cpus,
    set_period,
)

_LOG: Final = logging.getLogger(__name__)

_POLL_S: Final = 50e-6
_FRESH_NS: Final = 300_000
_PATIENCE_NS: Final = 50_000_000


class Events(Protocol):
    """A set of events that trigger a program."""

    def open(self) -> None:
        """Open, attach and enable the events. Raises ``HostError``."""

    def follow(self) -> None:
        """Adapt to CPU hotplug."""

    def disable(self) -> None:
        """Disable the events. Once this method returns, the program no longer runs."""

    def close(self) -> None:
        """Close the descriptors and do nothing else. May be called in a forked child."""


class _CpuEvent(NamedTuple):
    fd: int
    runs: int
    times: bytes | None


class PerCpuEvents(EventPerCpu[_CpuEvent]):
    """An event on each online CPU.

    If a CPU goes offline and back online between two calls to :meth:`follow`, its event is dead:
    the event no longer runs the program, and its enabled time does not advance.

    Args:
        cpus: CPUs to sample; empty means all.
        runs: returns, without system calls, how often the program has run for the event on a CPU.
    """

    def __init__(
        self,
        files: HostFiles,
        program_fd: int,
        attributes: PerfAttributes,
        cpus: Iterable[int],
        runs: Callable[[int], int],
        *,
        name: str = CPU_CLOCK,
    ) -> None:
        super().__init__(files, cpus)
        self.name = name
        self._program_fd = program_fd
        self._attributes = attributes._replace(
            read_format=TIME_ENABLED, flags=attributes.flags | DISABLED
        )
        self._runs = runs
        self._paused = False

    @property
    def cpus(self) -> tuple[int, ...]:
        """Returns the CPUs being sampled."""
        return tuple(sorted(self._events))

    def open(self) -> None:
        """Open an event on each selected CPU that is online."""
        for cpu, refusal in self.update().refused.items():
            raise self._convert(refusal, cpu) from refusal
        if not self._events:
            raise _none_online(self._wanted)

    def follow(self) -> None:
        """Open events on new CPUs, and close dead events and events on offline CPUs."""
        try:
            changes = self.update()
        except OSError as error:
            _LOG.warning("cannot track CPU hotplug: %s", describe_error(error))
            return
        for cpu in changes.closed:
            _LOG.info("CPU %d is no longer being sampled%s", cpu, self._suffix)
        for cpu in changes.opened:
            _LOG.info("CPU %d is now being sampled%s", cpu, self._suffix)
        for cpu, refusal in changes.refused.items():
            _LOG.warning("cannot sample CPU %d%s: %s", cpu, self._suffix, refusal)

    def disable(self) -> None:
        """Stop sampling on every CPU."""
        for event in self._events.values():
            disable_event(event.fd)

    def pause(self) -> None:
        """Stop sampling until :meth:`resume`, including on CPUs brought online during the pause."""
        self._paused = True
        self.disable()

    def resume(self) -> None:
        """Resume sampling after :meth:`pause`, from where each CPU's period was interrupted."""
        self._paused = False
        for event in self._events.values():
            enable_event(event.fd)

    def check(self, cpus: Iterable[int]) -> None:
        """Raise ``HostError`` if all ``cpus`` are offline. An empty ``cpus`` means all CPUs."""
        check_online(cpus, self._files)

    def select(self, cpus: Iterable[int]) -> None:
        """Sample only these CPUs. CPUs that are already being sampled are not interrupted."""
        self._wanted = frozenset(cpus)
        self.follow()

    def close(self) -> None:
        """Close the events."""
        while self._events:
            self._close_event(self._events.popitem()[1])

    @property
    def _suffix(self) -> str:
        return "" if self.name == CPU_CLOCK else f" for {self.name}"

    def _convert(self, error: OSError, cpu: int) -> HostError:
        return find_event_error(error, self.name, self._attributes, self._files) or _open_error(
            error, self._files, f"CPU {cpu}"
        )

    def _open_event(self, cpu: int) -> _CpuEvent:
        runs = self._runs(cpu)
        fd = _open_attached(self._attributes, self._program_fd, cpu=cpu, enable=not self._paused)
        return _CpuEvent(fd, runs, None)

    def _close_event(self, event: _CpuEvent) -> None:
        os.close(event.fd)

    def _is_dead(self, cpu: int) -> bool:
        """Returns whether a CPU's event has stopped counting, as it does when the CPU goes offline.

        Reading an event interrupts the CPU, so only events whose program has not run are read.
        """
        if self._paused:
            return False
        event = self._events[cpu]
        runs = self._runs(cpu)
        times = os.read(event.fd, 16) if runs == event.runs else None
        self._events[cpu] = event._replace(runs=runs, times=times)
        return times is not None and times == event.times


class CpuEvents(PerCpuEvents):
    """A cpu-clock event on each online CPU; see :class:`PerCpuEvents`."""

    def __init__(
        self,
        files: HostFiles,
        program_fd: int,
        period_ns: int,
        cpus: Iterable[int],
        runs: Callable[[int], int],
    ) -> None:
        clock = PerfAttributes(COUNT_SW_CPU_CLOCK, sample_period=period_ns)
        super().__init__(files, program_fd, clock, cpus, runs)
        self._throttling = ""

    def open(self) -> None:
        """Open an event on each selected CPU that is online."""
        super().open()
        self._warn_of_throttling()

    def follow(self) -> None:
        """Adapt to CPU hotplug, and log a warning when the kernel starts to suspend events."""
        self._warn_of_throttling()
        super().follow()

    def set_period(self, period_ns: int, now_ns: Callable[[], int]) -> int:
        """Change the sampling period. Blocks for at most the previous period.

        Changing an event restarts its period, so each event is stopped just after a sample. No
        event starts again before all are stopped, so that all samples before a common time have the
        previous period, and all later samples the new period. Returns this time, read from
        ``now_ns``.
        """
        for cpu in self._just_sampled(tuple(self._events)):
            disable_event(self._events[cpu].fd)
        changed_ns = now_ns()
        for event in self._events.values():
            set_period(event.fd, period_ns)
            if not self._paused:
                enable_event(event.fd)
        self._attributes = self._attributes._replace(sample_period=period_ns)
        return changed_ns

    def between_samples(self, action: Callable[[], None]) -> None:
        """Run a function that calls bpf(2), just after a sample on this thread's CPU.

        The kernel skips samples on a CPU that is executing bpf(2), so the function should return
        before the next sample. Blocks for up to one sampling period.
        """
        allowed = os.sched_getaffinity(0)
        cpu = sorted(allowed & self._events.keys())[:1]
        if cpu:
            os.sched_setaffinity(0, cpu)
        try:
            for _ in self._just_sampled(cpu):
                pass
            action()
        finally:
            os.sched_setaffinity(0, allowed)

    def _warn_of_throttling(self) -> None:
        rate = round(1_000_000_000 / self._attributes.sample_period)
        warning = find_throttling(self._files, rate, get_tick_rate())
        if warning and warning != self._throttling:
            _LOG.warning("%s", warning)
        self._throttling = warning

    def _just_sampled(self, cpus: Iterable[int]) -> Iterator[int]:
        """Yields each CPU just after a sample.

        Once a time limit is reached, yields the remaining CPUs without waiting.
        """
        waiting = {cpu: self._runs(cpu) for cpu in cpus}
        patience = 0 if self._paused else 2 * self._attributes.sample_period + _PATIENCE_NS
        looked = time.monotonic_ns()
        deadline = looked + patience
        while waiting and looked < deadline:
            time.sleep(_POLL_S)
            last_look, looked = looked, time.monotonic_ns()
            for cpu, runs in tuple(waiting.items()):
                waiting[cpu] = self._runs(cpu)
                # If this thread was preempted, the sample may be too old; wait for the next sample.
                if waiting[cpu] != runs and time.monotonic_ns() - last_look < _FRESH_NS:
                    del waiting[cpu]
                    yield cpu
        yield from waiting


class ChildEvents:
    """An event on a process and its descendants, which starts counting at the process's next exec.

    A child starts with a full period, so processes that live for less than a period are
    underrepresented.
    """

    def __init__(self, files: HostFiles, program_fd: int, period_ns: int, pid: int) -> None:
        self._files = files
        self._program_fd = program_fd
        self._pid = pid
        self._attributes = PerfAttributes(
            COUNT_SW_CPU_CLOCK, sample_period=period_ns, flags=DISABLED | INHERIT | ENABLE_ON_EXEC
        )
        self._fd = -1

    def open(self) -> None:
        """Open the event; the kernel enables it when the process executes a program."""
        try:
            self._fd = _open_attached(self._attributes, self._program_fd, pid=self._pid)
        except OSError as error:
            raise _open_error(error, self._files, f"process {self._pid}") from error

    def follow(self) -> None:
        """Does nothing, because the event follows its process across CPUs."""

    def disable(self) -> None:
        """Stop sampling the process and its descendants."""
        disable_event(self._fd)

    def close(self) -> None:
        """Close the event."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_attached(
    attributes: PerfAttributes,
    program_fd: int,
    *,
    pid: int = -1,
    cpu: int = -1,
    enable: bool = False,
) -> int:
    fd = open_perf_event(attributes, pid=pid, cpu=cpu)
    try:
        attach_program(fd, program_fd)
        if enable:
            enable_event(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_online(cpus: Iterable[int], files: HostFiles) -> None:
    """Raise ``HostError`` if all ``cpus`` are offline. An empty ``cpus`` means all CPUs."""
    wanted = frozenset(cpus)
    if wanted and not wanted & read_online_cpus(files):
        raise _none_online(wanted)


def _none_online(wanted: Iterable[int]) -> HostError:
    return HostError(
        f"none of the CPUs {sorted(wanted)} is online",
        hint="choose CPUs from /sys/devices/system/cpu/online",
    )


def _open_error(error: OSError, files: HostFiles, where: str) -> HostError:
    action = f"opening a perf event on {where}"
    if error.errno in (errno.EPERM, errno.EACCES):
        return get_privilege_error(action, files)
    if error.errno == errno.ESRCH:
        return HostError(f"{where} has ended")
    return find_open_files_error(action, error) or KernelFeatureError(
        f"{action} failed: {error}",
        hint="use a kernel built with CONFIG_PERF_EVENTS and CONFIG_BPF_EVENTS",
    )
