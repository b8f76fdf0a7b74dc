"""Writes pprof's ``profile.proto``, gzipped (github.com/google/pprof, proto/profile.proto)."""

import gzip
from collections.abc import Iterable, Sequence
from typing import Final

from otel_kprofiler.formats.entries import frame_entries, process_id, process_name
from otel_kprofiler.model import (
    ON_CPU,
    Frame,
    Line,
    Module,
    Profile,
    ProfileKind,
    Resource,
    Stack,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import wire
from otel_kprofiler.text import escape_surrogates

# Field numbers of the messages Profile, Sample, Mapping, Location, Line, Function, ValueType.
_SAMPLE_TYPE, _SAMPLE, _MAPPING, _LOCATION, _FUNCTION, _STRING = 1, 2, 3, 4, 5, 6
_TIME_NANOS, _DURATION_NANOS, _PERIOD_TYPE, _PERIOD = 9, 10, 11, 12
_DEFAULT_SAMPLE_TYPE: Final = 14
_USER_CEILING: Final = 1 << 63


def pprof(windows: Iterable[Window]) -> bytes:
    """Returns all windows as one profile, gzipped.

    The values are the number of samples, and one value per kind: CPU time if the kind has a period,
    otherwise the sum of the kind's values. By default, pprof shows CPU time. Labels contain
    process, pid, thread, tid, cpu and endpoint (local root span), all as strings, because pprof
    drops a numeric 0. To select an exact number, use ``pprof -tagfocus='cpu=^0$'``. Unresolved
    native frames have an address and a mapping, but no function. Unresolved Python frames have a
    function with a bracketed name.
    """
    windows = list(windows)
    encoder = _Encoder(
        dict.fromkeys(profile.kind for window in windows for profile in window.profiles)
    )
    for window in windows:
        encoder.add_window(window)
    return gzip.compress(encoder.finish(), mtime=0)


class _Encoder:
    def __init__(self, kinds: Iterable[ProfileKind]) -> None:
        self._kinds = tuple(kinds) or (ON_CPU,)
        self._out = bytearray()
        self._strings: dict[str, int] = {"": 0}
        self._stacks: dict[Stack, bytes] = {}
        self._mappings: dict[Module, int] = {}
        self._functions: dict[tuple[str, str, str, int], int] = {}
        self._locations: dict[tuple[int, int, tuple[Line, ...]], int] = {}
        self._start_ns = 0
        self._end_ns = 0
        self._period_ns = 0
        for value_type in (("samples", "count"), *(kind.measure for kind in self._kinds)):
            self._out += _message(_SAMPLE_TYPE, self._value_type(*value_type))

    def add_window(self, window: Window) -> None:
        self._start_ns = min(self._start_ns or window.start_unix_ns, window.start_unix_ns)
        self._end_ns = max(self._end_ns, window.end_unix_ns)
        for profile in window.profiles:
            self._period_ns = profile.period_ns or self._period_ns
            for resource, sample in profile.samples:
                self._add_sample(resource, sample, profile)

    def _add_sample(self, resource: Resource, sample: WindowSample, profile: Profile) -> None:
        is_count = profile.kind.counts_samples
        values = [sample.weight if is_count else len(sample.timestamps_unix_ns)]
        measured = profile.measure(sample.weight)
        values += [measured if kind == profile.kind else 0 for kind in self._kinds]
        body = self._stack(sample.stack) + _packed(2, values)
        labels = {
            "process": process_name(resource, sample.thread_name),
            "pid": process_id(resource),
            "thread": sample.thread_name,
            "tid": sample.tid,
            "cpu": sample.cpu,
            "endpoint": (sample.link and sample.link.local_root) or None,
        }
        for key, value in (*labels.items(), *sample.labels):
            if value is not None:
                text = _number(1, self._string(key)) + _number(2, self._string(str(value)))
                body += _message(3, text)
        self._out += _message(_SAMPLE, body)

    def _stack(self, stack: Stack) -> bytes:
        packed = self._stacks.get(stack)
        if packed is None:
            packed = _packed(1, [self._location(frame) for frame in stack.frames])
            self._stacks[stack] = packed
        return packed

    def _location(self, frame: Frame) -> int:
        mapping = self._mapping(frame.module) if frame.module else 0
        key = (mapping, frame.address, frame.lines)
        location = self._locations.get(key)
        if location is None:
            location = self._locations[key] = len(self._locations) + 1
            base = frame.module.base if frame.module else 0
            body = _number(1, location) + _number(2, mapping) + _number(3, base + frame.address)
            for line in frame.lines or _stand_ins(frame):
                number = _number(1, self._function(line)) + _number(2, line.line)
                body += _message(4, number)
            self._out += _message(_LOCATION, body)
        return location

    def _mapping(self, module: Module) -> int:
        number = self._mappings.get(module)
        if number is None:
            number = self._mappings[module] = len(self._mappings) + 1
            limit = max((part.end for part in module.ranges), default=_USER_CEILING)
            start = module.base + module.extent.start
            body = _number(1, number) + _number(2, start) + _number(3, max(limit, start))
            body += _number(4, module.file_offset)
            body += _number(5, self._string(module.name))
            body += _number(6, self._string(module.build_id or module.file_id)) + _number(7, 1)
            self._out += _message(_MAPPING, body)
        return number

    def _function(self, line: Line) -> int:
        names = (line.function, line.system_name or line.function, line.file)
        key = (*names, line.start_line)
        number = self._functions.get(key)
        if number is None:
            number = self._functions[key] = len(self._functions) + 1
            body = _number(1, number)
            for field, text in enumerate(names, start=2):
                body += _number(field, self._string(text))
            body += _number(5, line.start_line)
            self._out += _message(_FUNCTION, body)
        return number

    def _value_type(self, kind: str, unit: str) -> bytes:
        return _number(1, self._string(kind)) + _number(2, self._string(unit))

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def finish(self) -> bytes:
        self._out += _message(_PERIOD_TYPE, self._value_type(*self._kinds[0].measure))
        self._out += _number(_PERIOD, self._period_ns) + _number(_TIME_NANOS, self._start_ns)
        self._out += _number(_DURATION_NANOS, self._end_ns - self._start_ns)
        default = ON_CPU if ON_CPU in self._kinds else self._kinds[0]
        self._out += _number(_DEFAULT_SAMPLE_TYPE, self._string(default.measure[0]))
        for text in self._strings:
            self._out += _message(_STRING, escape_surrogates(text).encode())
        return bytes(self._out)


def _stand_ins(frame: Frame) -> tuple[Line, ...]:
    """Returns placeholder functions for an unnamed frame; empty for native frames."""
    if not frame.side.has_files:
        return ()
    return tuple(Line(entry.name) for entry in frame_entries(frame))


def _number(field: int, value: int) -> bytes:
    return wire.varint(field << 3) + wire.varint(value & wire.MASK_64) if value else b""


def _message(field: int, body: bytes) -> bytes:
    return wire.delimited(wire.varint(field << 3 | 2), body)


def _packed(field: int, values: Sequence[int]) -> bytes:
    packed = b"".join([wire.varint(value & wire.MASK_64) for value in values])
    return _message(field, packed) if values else b""
