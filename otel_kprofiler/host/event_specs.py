"""Looks up events by name, lists them, and explains why an event cannot be opened.

Perf events are named as in ``perf list``, and numbered as in ``enum perf_sw_ids`` and ``enum
perf_hw_id`` in include/uapi/linux/perf_event.h.
"""

import difflib
import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias

from otel_kprofiler.errors import HostError, KernelFeatureError
from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.cpus import read_online_cpus
from otel_kprofiler.host.lock_spec import LOCK_EVENT, LockSpec
from otel_kprofiler.host.perf import (
    DISABLED,
    FREQUENCY,
    TYPE_HARDWARE,
    TYPE_SOFTWARE,
    PerfAttributes,
    open_perf_event,
)
from otel_kprofiler.host.privilege_errors import get_privilege_error
from otel_kprofiler.host.throttling import MAX_SAMPLE_RATE
from otel_kprofiler.host.tracepoint_specs import MAX_PERIOD, TracepointSpec, parse_tracepoint
from otel_kprofiler.model import ProfileKind

CPU_CLOCK: Final = "cpu-clock"
"""Name of the event for on-CPU samples."""
MAX_EVENTS: Final = 16
_MAX_RATE: Final = 10_000

_EVENTS: Final = {
    "page-faults": (TYPE_SOFTWARE, 2, "page faults"),
    "context-switches": (TYPE_SOFTWARE, 3, "switches from one thread to another"),
    "cpu-migrations": (TYPE_SOFTWARE, 4, "migrations of threads to another CPU"),
    "minor-faults": (TYPE_SOFTWARE, 5, "page faults served from memory"),
    "major-faults": (TYPE_SOFTWARE, 6, "page faults that read from a device"),
    "alignment-faults": (TYPE_SOFTWARE, 7, "unaligned accesses that the kernel handles"),
    "emulation-faults": (TYPE_SOFTWARE, 8, "instructions that the kernel emulates"),
    "cycles": (TYPE_HARDWARE, 0, "processor cycles"),
    "instructions": (TYPE_HARDWARE, 1, "instructions executed"),
    "cache-references": (TYPE_HARDWARE, 2, "last-level cache accesses"),
    "cache-misses": (TYPE_HARDWARE, 3, "last-level cache misses"),
    "branch-instructions": (TYPE_HARDWARE, 4, "branches executed"),
    "branch-misses": (TYPE_HARDWARE, 5, "branches predicted wrongly"),
    "bus-cycles": (TYPE_HARDWARE, 6, "bus cycles"),
    "stalled-cycles-frontend": (TYPE_HARDWARE, 7, "cycles without instructions to decode"),
    "stalled-cycles-backend": (TYPE_HARDWARE, 8, "cycles in which no instruction could run"),
    "ref-cycles": (TYPE_HARDWARE, 9, "cycles at the processor's base frequency"),
}
_ALIASES: Final = {
    "faults": "page-faults",
    "cs": "context-switches",
    "migrations": "cpu-migrations",
    "cpu-cycles": "cycles",
    "branches": "branch-instructions",
    "task-clock": CPU_CLOCK,  # task-clock opened on a CPU counts like cpu-clock
}
_NAMES: Final = (CPU_CLOCK, LOCK_EVENT, *_EVENTS)


class EventSpec(NamedTuple):
    """An event to sample on each CPU, named as in ``perf list``.

    Attributes:
        period: number of events from one sample to the next; 0 if ``rate`` is set.
        rate: target samples per second; 0 if ``period`` is set.
    """

    name: str
    period: int = 0
    rate: int = 0

    @property
    def kind(self) -> ProfileKind:
        """Returns the kind of the event's samples. A sample's value is a number of events."""
        name = self.name.replace("-", "_")
        return ProfileKind(name, name, "count")

    @property
    def attributes(self) -> PerfAttributes:
        """Returns the attributes for opening the event."""
        type_, config, _ = _EVENTS[self.name]
        if self.period:
            return PerfAttributes(config, self.period, type=type_)
        return PerfAttributes(config, self.rate, flags=FREQUENCY, type=type_)

    @property
    def is_hardware(self) -> bool:
        """Returns whether a counter of the CPU, which may raise an NMI, counts the event."""
        return self.attributes.type != TYPE_SOFTWARE

    def __str__(self) -> str:
        return f"{self.name}:" + (f"period={self.period}" if self.period else f"freq={self.rate}")


class EventState(NamedTuple):
    """An event. ``problem`` explains why this process cannot open the event; otherwise None."""

    name: str
    meaning: str
    problem: HostError | None


AnyEventSpec: TypeAlias = EventSpec | TracepointSpec | LockSpec
"""Any event that can be sampled."""


def find_repeated_event(specs: Iterable[AnyEventSpec]) -> str:
    """Returns the name of an event that is selected more than once; empty if all are distinct."""
    counts = Counter(spec.name for spec in specs)
    return next((name for name, count in counts.items() if count > 1), "")


def parse_event(
    text: str, rate: int, period: int = 0, clock_rate: int | None = None
) -> AnyEventSpec:
    """Parses ``NAME``, ``NAME:period=N``, ``NAME:freq=N`` or a tracepoint.

    Accepts any name that could be a tracepoint name; see :func:`parse_tracepoint`. By default, a
    sample is taken every ``period`` events, or, if ``period`` is 0, ``rate`` times a second on each
    CPU. For cpu-clock, ``clock_rate`` is used instead of ``rate``. Raises ``ValueError``, which
    lists the valid values, if no event has this name or a setting is invalid.
    """
    name, _, setting = text.strip().partition(":")
    name = _ALIASES.get(name, name)
    if name not in _NAMES:
        if tracepoint := parse_tracepoint(text, period):
            return tracepoint
        near = suggest_events(name)
        raise ValueError(
            f"no event is called {name!r}"
            + (f"; did you mean {' or '.join(near)}?" if near else "")
            + "; `record -e help` lists all events"
        )
    has_period = name not in (CPU_CLOCK, LOCK_EVENT)
    if not has_period:
        period, rate = 0, (clock_rate if name == CPU_CLOCK and clock_rate else rate)
    if setting:
        key, _, number = setting.partition("=")
        most = {"period": MAX_PERIOD, "freq": _MAX_RATE}.get(key, 0)
        if not number.isdecimal() or not 1 <= int(number) <= most:
            raise ValueError(
                f"{text} has an invalid setting: write {name}:period=N (N events per sample) or "
                f"{name}:freq=N (N samples per second on each CPU, at most {_MAX_RATE:,})"
            )
        if key == "period" and not has_period:
            raise ValueError(f"{name} does not support a period: write {name}:freq=N")
        period, rate = (int(number), 0) if key == "period" else (0, int(number))
    return LockSpec(rate) if name == LOCK_EVENT else EventSpec(name, period, 0 if period else rate)


def suggest_events(name: str) -> list[str]:
    """Returns the event names, excluding tracepoints, that resemble ``name``."""
    return difflib.get_close_matches(name, [*_NAMES, *_ALIASES], 3)


def list_events(files: HostFiles) -> Iterator[EventState]:
    """Yields each perf event except cpu-clock, and whether this process can open it."""
    cpu = min(read_online_cpus(files))
    for name, (_, _, meaning) in _EVENTS.items():
        spec = EventSpec(name, period=1 << 40)
        problem = None
        try:
            os.close(open_perf_event(spec.attributes._replace(flags=DISABLED), cpu=cpu))
        except OSError as error:
            problem = find_event_error(error, name, spec.attributes, files) or HostError(str(error))
        yield EventState(name, meaning, problem)


def find_event_error(
    error: OSError, name: str, attributes: PerfAttributes, files: HostFiles
) -> HostError | None:
    """Explains why perf_event_open(2) rejected an event; None for errors such as ``EMFILE``."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return get_privilege_error(f"opening event {name}", files)
    if error.errno == errno.EINVAL and attributes.flags & FREQUENCY:
        return HostError(
            f"the kernel rejected {name} with {attributes.sample_period} samples per second",
            hint=f"choose a rate of at most {MAX_SAMPLE_RATE}, or {name}:period=N",
        )
    return _find_counter_error(error, name, files) if attributes.type == TYPE_HARDWARE else None


def _find_counter_error(error: OSError, name: str, files: HostFiles) -> HostError | None:
    if error.errno == errno.EBUSY:
        return HostError(
            f"all performance counters that can count {name} are in use",
            hint="stop other profilers, or free a counter: sysctl -w kernel.nmi_watchdog=0",
        )
    if error.errno not in (errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL):
        return None
    if not _has_counters(files):
        return KernelFeatureError(
            f"{name} cannot be counted: the kernel found no performance counters",
            hint="a virtual machine has counters if its host passes them through "
            "(QEMU: -cpu host,pmu=on); cpu-clock works everywhere",
        )
    return KernelFeatureError(
        f"this processor's performance counters cannot sample {name} ({error.strerror})",
        hint="`record -e help` lists the events that the processor has",
    )


def _has_counters(files: HostFiles) -> bool:
    """Returns whether the kernel has a driver for the processor's performance counters."""
    try:
        names = files.list_dir("/sys/bus/event_source/devices")
    except OSError:
        return False
    return any(name == "cpu" or name.startswith(("cpu_", "armv8_", "apple_")) for name in names)
