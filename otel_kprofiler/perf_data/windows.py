"""Converts the samples in a ``perf.data`` file to a window of profiles."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from os.path import basename
from typing import Final

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import (
    ON_CPU,
    AttributeValue,
    LossCause,
    Profile,
    ProfileKind,
    Resource,
    ResourceSamples,
    Stack,
    Window,
    WindowSample,
)
from otel_kprofiler.perf_data.file import EventAttr, Reader
from otel_kprofiler.perf_data.naming import Names
from otel_kprofiler.perf_data.processes import Process, Processes
from otel_kprofiler.perf_data.records import (
    STACK_USER,
    USER_MODE,
    Comm,
    FileMapping,
    Fork,
    Ksymbol,
    Loss,
    Sample,
    Throttle,
    read_records,
)
from otel_kprofiler.perf_data.stacks import Stacks
from otel_kprofiler.text import decode_name, describe_count

_SOFTWARE: Final = 1  # PERF_TYPE_SOFTWARE
_CLOCKS: Final = (0, 1)  # PERF_COUNT_SW_CPU_CLOCK, _TASK_CLOCK
_MODIFIERS: Final = re.compile(r":[ukhHGIpPSDWeb]+$")
"""Matches modifiers at the end of event names, such as ``:u`` for user mode (perf-list(1))."""
_IDLE: Final = "swapper"

_Group = tuple[Process, Stack, int, str, int]


@dataclass(slots=True)
class _Event:
    times: dict[_Group, list[int]] = field(default_factory=dict)
    values: dict[_Group, list[int]] = field(default_factory=dict)
    periods: Counter[int] = field(default_factory=Counter)
    lost: Counter[bool] = field(default_factory=Counter)
    """The numbers of lost samples (key True) and of lost records of any type (False)."""


def read_perf_data(
    data: bytes,
    written_unix_ns: int,
    notify: Callable[[str], None],
    names: Names | None = None,
) -> list[Window]:
    """Reads ``perf record`` output, in file or pipe format. Returns a list with one window.

    ``cpu-clock`` and ``task-clock`` samples become on-CPU samples. All other events become
    separate kinds of samples, with event counts as values. Frames are symbolized if this host has a
    file, or is running a kernel, with the same build id. Frames that are not symbolized consist of
    only a file and an offset.

    ``written_unix_ns`` is the Unix time at which the file was written, which is taken as the time
    of the last record unless the file specifies its clock (``perf record -k``). ``notify`` is
    called with a message about missing data. ``names`` resolves code addresses; by default, from
    files on this host. Raises ``PayloadError`` if the file is malformed, is not supported, or
    contains no samples.
    """
    reader = Reader(data)
    records = read_records(reader)
    if names is None:
        from otel_kprofiler.perf_data.code_names import CodeNames  # noqa: PLC0415 - imports symbols

        names = CodeNames()
    recording = _Recording(reader, Stacks(reader.file.build_ids, names))
    for record in records:
        recording.add(record)
    if not any(event.times for event in recording.events):
        problem = f" ({reader.problem})" if reader.problem else ""
        raise PayloadError(f"the perf.data file contains no samples{problem}")
    if reader.problem:
        notify(f"data is missing or corrupt: {reader.problem}")
    recording.remark(notify)
    last_ns = records[-1].time_ns
    offset_ns = reader.file.clock_offset_ns
    return [recording.window(written_unix_ns - last_ns if offset_ns is None else offset_ns)]


class _Recording:
    def __init__(self, reader: Reader, stacks: Stacks) -> None:
        self._file = reader.file
        self._stacks = stacks
        self._processes = Processes()
        self._throttled = 0
        self._has_build_ids = False
        self.events = [_Event() for _ in reader.file.attrs]
        self._first_clock = next(
            (index for index, attr in enumerate(reader.file.attrs) if _is_clock(attr)), -1
        )

    def add(self, record: object) -> None:
        """Adds a record. Records must be added in time order."""
        match record:
            case Sample():
                self._add_sample(record)
            case FileMapping(pid=-1):
                self._stacks.map_kernel(record)
            case FileMapping():
                self._has_build_ids |= bool(record.build_id)
                self._processes.map(record)
            case Comm():
                self._processes.rename(record)
            case Fork():
                self._processes.fork(record)
            case Ksymbol():
                self._stacks.load(record)
            case Loss() if self.events:
                self.events[record.event].lost[record.is_samples] += record.records
            case Throttle():
                self._throttled += 1

    def _add_sample(self, sample: Sample) -> None:
        process = self._processes.process(sample.pid)
        if process.resource is None:
            process.resource = self._resource(process)
        if sample.mode == USER_MODE:
            process.run()
        name = decode_name(self._processes.name(sample.pid, sample.tid)) if sample.tid else _IDLE
        stack = self._stacks.resolve(process, sample.chain, sample.mode)
        group = process, stack, sample.tid, name, sample.cpu
        event = self.events[sample.event]
        event.times.setdefault(group, []).append(max(sample.time_ns, 0))
        event.values.setdefault(group, []).append(sample.period)
        event.periods[sample.period] += 1

    def _resource(self, process: Process) -> Resource:
        file = self._file
        name = basename(decode_name(process.program))
        attributes: dict[str, AttributeValue] = {"process.pid": process.pid}
        name = name or decode_name(self._processes.name(process.pid, process.pid))
        texts = {
            "process.executable.name": name if process.pid else _IDLE,
            "process.executable.path": decode_name(process.program),
            "host.name": file.hostname,
            "os.version": file.os_release,
        }
        attributes |= {key: text for key, text in texts.items() if text}
        return Resource(attributes | {"os.type": "linux"})

    def remark(self, notify: Callable[[str], None]) -> None:
        if self._throttled:
            times = describe_count(self._throttled, "time")
            notify(f"the kernel suspended sampling {times} because its rate was too high")
        if not self._file.build_ids and not self._has_build_ids:
            notify(
                "code has no names, because the file has no build ids; add them with "
                "`perf inject -b -i FILE -o OTHER`"
            )
        if any(attr.sample_type & STACK_USER for attr in self._file.attrs):
            notify(
                "user stacks end at their first frame: copies of stack memory "
                "(--call-graph dwarf) are not unwound"
            )

    def window(self, offset_ns: int) -> Window:
        """Returns all samples as a window.

        ``offset_ns`` is added to sample times to obtain Unix times. It is increased if it would
        result in times before 1970. Raises ``PayloadError`` if times do not fit into 63 bits.
        """
        ends = [
            time
            for event in self.events
            for group in event.times.values()
            for time in (group[0], group[-1])
        ]
        offset_ns = max(offset_ns, -min(ends))
        if max(ends) + offset_ns >> 63:
            raise PayloadError("the clock in the perf.data file is out of range")
        profiles: dict[ProfileKind, Profile] = {}
        for index, event in enumerate(self.events):
            if event.times:
                kind, period = self._kind(index, event)
                if kind in profiles:
                    kind, period = kind._replace(name=f"{kind.name}_{index}", number=0), 0
                profiles[kind] = self._profile(kind, period, event, offset_ns)
        start, end = min(ends) + offset_ns, max(ends) + offset_ns + 1
        return Window(start, end, list(profiles.values()))

    def _profile(self, kind: ProfileKind, period: int, event: _Event, offset_ns: int) -> Profile:
        by_process: dict[Process, list[WindowSample]] = {}
        for group, times in event.times.items():
            process, stack, tid, name, cpu = group
            by_process.setdefault(process, []).append(
                WindowSample(
                    stack, tid, name, cpu, None, [time + offset_ns for time in times],
                    [] if period else event.values[group],
                )
            )  # fmt: skip
        resources = [
            ResourceSamples(process.resource or Resource({}), samples)
            for process, samples in by_process.items()
        ]
        lost = event.lost[True] or event.lost[False]
        taken = event.periods.total() + lost
        return Profile(kind, period, resources, taken, {LossCause.RING_FULL: lost} if lost else {})

    def _kind(self, index: int, event: _Event) -> tuple[ProfileKind, int]:
        """Returns an event's profile kind and period (0 if each sample has its own value)."""
        attr = self._file.attrs[index]
        if _is_clock(attr):
            if len(event.periods) == 1 and index == self._first_clock:
                return ON_CPU, next(iter(event.periods))
            name = self._name(index, attr)
            return ProfileKind(name, "cpu", "nanoseconds"), 0
        name = self._name(index, attr)
        return ProfileKind(name, name, "count"), 0

    def _name(self, index: int, attr: EventAttr) -> str:
        full = [self._file.names.get(at, f"event {at}") for at in range(len(self._file.attrs))]
        short = [_MODIFIERS.sub("", name) for name in full]
        name = full[index] if short.count(short[index]) > 1 else short[index]
        return name.replace("-", "_")


def _is_clock(attr: EventAttr) -> bool:
    return attr.type == _SOFTWARE and attr.config in _CLOCKS
