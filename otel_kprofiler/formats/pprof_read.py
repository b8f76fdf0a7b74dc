"""Reads pprof's ``profile.proto`` (github.com/google/pprof, proto/profile.proto).

Each value type becomes a sample kind. ``samples`` and CPU time both belong to the on-CPU kind, if
the time is a multiple of the period. With other kinds, ``samples`` states how many samples a value
is the sum of. The format has no sample timestamps, so every sample is assigned the time of the
profile. Labels are kept, except for those that identify the thread, which set the sample's process,
thread and CPU.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os.path import basename
from typing import Final, NamedTuple

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    PYTHON_SIDE,
    USER_SIDE,
    AddressRange,
    BuildId,
    FileId,
    Frame,
    LabelSet,
    Line,
    Module,
    ModuleKind,
    Profile,
    ProfileKind,
    Resource,
    ResourceSamples,
    Stack,
    Unresolved,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import wire

_Value = int | bytes

_SAMPLE_TYPE, _SAMPLE, _MAPPING, _LOCATION, _FUNCTION, _STRING = 1, 2, 3, 4, 5, 6
_TIME_NANOS, _DURATION_NANOS, _PERIOD = 9, 10, 12
_FIELDS: Final = range(1, 16)
_KERNEL_FLOOR: Final = 1 << 63
_KERNEL: Final = re.compile(r"vmlinux$|\[kernel")
_COUNT: Final = ("samples", "count")
_CPU_TIME: Final = ("cpu", "nanoseconds")
_MOST_DIVIDED: Final = 1_000_000
"""Maximum number of values after sums of several samples have been divided among the samples."""
_OF_THREAD: Final = frozenset({"process", "pid", "thread", "tid", "cpu"})
"""Labels that describe a sample's thread and CPU, as in files that ``record`` writes."""


class _Sample(NamedTuple):
    locations: tuple[int, ...]
    values: tuple[int, ...]
    labels: dict[str, str | int]


def is_pprof(data: bytes) -> bool:
    """Returns whether the data is a pprof profile, whose string table must start with ""."""
    try:
        for number, value in _fields(data):
            if number not in _FIELDS:
                return False
            if number == _STRING:
                return value == b""
    except PayloadError:
        return False
    return False


def parse_pprof(data: bytes) -> list[Window]:
    """Parses a decompressed profile into a window.

    Raises ``PayloadError`` if the profile is malformed.
    """
    return [_Reader(data).window()]


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._messages: dict[int, list[bytes]] = {}
        self._numbers: dict[int, int] = {}
        for number, value in _fields(data):
            if isinstance(value, bytes):
                self._messages.setdefault(number, []).append(value)
            else:
                self._numbers[number] = value
        self._strings = [text.decode(errors="replace") for text in self._all(_STRING)]
        self._modules = dict(map(self._module, self._all(_MAPPING)))
        self._functions = dict(map(self._function, self._all(_FUNCTION)))
        self._frames = dict(map(self._frame, self._all(_LOCATION)))
        self._stacks: dict[tuple[int, ...], Stack] = {}

    def window(self) -> Window:
        start = self._numbers.get(_TIME_NANOS, 0)
        samples = [self._sample(body) for body in self._all(_SAMPLE)]
        types = [self._type(body) for body in self._all(_SAMPLE_TYPE)]
        if any(len(sample.values) != len(types) for sample in samples):
            raise PayloadError("a sample does not have one value for each sample type")
        period = self._numbers.get(_PERIOD, 0)
        counts = parts = [1] * len(samples)
        if _COUNT in types and len(types) > 1:
            counts = [sample.values[types.index(_COUNT)] for sample in samples]
            if min(counts, default=0) > 0 and sum(counts) * len(types) <= _MOST_DIVIDED:
                parts = counts
        profiles = []
        for number, type_ in enumerate(types):
            if type_ == _COUNT and len(types) > 1:
                continue
            values = [sample.values[number] for sample in samples]
            kind, kind_period = ProfileKind(type_[0], *type_), 0
            if type_ == _CPU_TIME and _COUNT in types and _is_periodic(values, counts, period):
                kind, kind_period = ON_CPU, period
                values = [
                    count if value else 0 for value, count in zip(values, counts, strict=True)
                ]
            profiles.append(self._profile(samples, start, kind, kind_period, values, parts))
        return Window(start, start + max(1, self._numbers.get(_DURATION_NANOS, 0)), profiles)

    def _profile(  # noqa: PLR0917 - columns of the same table
        self,
        samples: Sequence[_Sample],
        time: int,
        kind: ProfileKind,
        period: int,
        values: Sequence[int],
        parts: Sequence[int],
    ) -> Profile:
        """Returns a profile with one value per sample, each divided into a number of ``parts``."""
        groups: dict[tuple[str, str], list[WindowSample]] = {}
        for sample, value, count in zip(samples, values, parts, strict=True):
            if value:
                divided = [value] if kind.counts_samples else _divide(value, count)
                labels = sample.labels
                owner = str(labels.get("process", "")), str(labels.get("pid", ""))
                groups.setdefault(owner, []).append(
                    WindowSample(
                        self._stack(sample.locations), _integer(labels.get("tid")),
                        str(labels.get("thread", "")), _integer(labels.get("cpu")), None,
                        [time] * len(divided), divided, _other_labels(labels),
                    )
                )  # fmt: skip
        resources = [
            ResourceSamples(_resource(*owner), samples) for owner, samples in groups.items()
        ]
        return Profile(kind, period, resources)

    def _sample(self, body: bytes) -> _Sample:
        locations, values, labels = list[int](), list[int](), dict[str, str | int]()
        for number, value in _fields(body):
            if number == 1:
                locations += _packed(value)
            elif number == 2:
                values += map(_signed, _packed(value))
            elif number == 3:
                label = dict(_fields(_message(value)))
                text = label.get(2)
                labels[self._string(label.get(1))] = (
                    self._string(text) if text else _signed(_number(label.get(3)))
                )
        return _Sample(tuple(locations), tuple(values), labels)

    def _stack(self, locations: tuple[int, ...]) -> Stack:
        stack = self._stacks.get(locations)
        if stack is None:
            try:
                frames = [self._frames[number] for number in locations]
            except KeyError as error:
                raise PayloadError(f"a sample refers to the missing location {error}") from None
            stack = self._stacks[locations] = Stack.from_frames(_with_kernel(frames))
        return stack

    def _frame(self, body: bytes) -> tuple[int, Frame]:
        values: dict[int, _Value] = {}
        lines: list[Line] = []
        for number, value in _fields(body):
            if number == 4:
                line = dict(_fields(_message(value)))
                function = self._functions.get(_number(line.get(1)), Line(""))
                lines.append(function._replace(line=_number(line.get(2))))
            else:
                values[number] = value
        address = _number(values.get(3))
        module = self._modules.get(_number(values.get(2)))
        is_kernel = address >= _KERNEL_FLOOR or bool(module and _KERNEL.match(module.name))
        if is_kernel and module:
            module = _kernel_module(module)
            address = max(0, address - module.base)
        unresolved = None
        if not lines:
            unresolved = Unresolved.NO_SYMBOL if module else Unresolved.UNMAPPED
        side = KERNEL_SIDE if is_kernel else USER_SIDE
        if not module and any(map(_is_python, lines)):
            side = PYTHON_SIDE
        frame = Frame(module, address, tuple(lines), 0, side, unresolved)
        return _number(values.get(1)), frame

    def _module(self, body: bytes) -> tuple[int, Module]:
        values = dict(_fields(body))
        start, limit = _number(values.get(2)), _number(values.get(3))
        build_id = self._string(values.get(6))
        return _number(values.get(1)), Module(
            name=basename(self._string(values.get(5))),
            kind=ModuleKind.USER,
            build_id=BuildId(build_id) if build_id else None,
            file_id=FileId(""),
            base=0,
            ranges=(AddressRange(start, limit, ""),) if limit else (),
            file_offset=_number(values.get(4)),
        )

    def _function(self, body: bytes) -> tuple[int, Line]:
        values = dict(_fields(body))
        name, system_name, file = (self._string(values.get(number)) for number in (2, 3, 4))
        system_name = "" if system_name == name else system_name
        start_line = _number(values.get(5))
        return _number(values.get(1)), Line(name, system_name, file, start_line=start_line)

    def _type(self, body: bytes) -> tuple[str, str]:
        values = dict(_fields(body))
        return self._string(values.get(1)), self._string(values.get(2))

    def _string(self, index: _Value | None) -> str:
        number = _number(index)
        if number >= max(1, len(self._strings)):
            raise PayloadError(f"the string table has no entry {number}")
        return self._strings[number] if self._strings else ""

    def _all(self, number: int) -> list[bytes]:
        return self._messages.get(number, [])


def _is_periodic(values: Sequence[int], counts: Sequence[int], period: int) -> bool:
    """Returns whether each value is a number of samples times the period.

    Values of 0 belong to samples of other kinds, if there are values greater than 0.
    """
    pairs = zip(values, counts, strict=True)
    return all(value in (0, count * period) for value, count in pairs) and (
        any(values) or not values
    )


def _divide(value: int, count: int) -> list[int]:
    """Divides a value among ``count`` samples; the first one gets the remainder."""
    return [value - value // count * (count - 1), *([value // count] * (count - 1))]


def _other_labels(labels: Mapping[str, str | int]) -> LabelSet:
    return tuple(
        sorted((key, str(value)) for key, value in labels.items() if key not in _OF_THREAD)
    )


def _is_python(line: Line) -> bool:
    """Returns whether a line without machine code is Python code, judging by its file name."""
    return line.file.endswith(".py") or line.file.startswith("<")


def _with_kernel(frames: Sequence[Frame]) -> list[Frame]:
    """Returns frames, leaf first, with all callees of kernel frames marked as kernel frames."""
    at = max((n for n, frame in enumerate(frames) if frame.side is KERNEL_SIDE), default=0)
    return [
        frame._replace(side=KERNEL_SIDE, module=frame.module and _kernel_module(frame.module))
        if n < at and frame.side is not KERNEL_SIDE
        else frame
        for n, frame in enumerate(frames)
    ]


def _kernel_module(module: Module) -> Module:
    """Converts a module to a kernel module whose base is the start of its first range."""
    kind = ModuleKind.VMLINUX if module.name == "vmlinux" else ModuleKind.LOADED
    base = module.ranges[0].start if module.ranges else 0
    return replace(module, kind=kind, base=base)


def _resource(process: str, pid: str) -> Resource:
    attributes: dict[str, str | int] = {}
    if process:
        attributes["process.executable.name"] = process
    if pid.isdecimal():
        attributes["process.pid"] = int(pid)
    return Resource(attributes)


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    try:
        yield from wire.read_fields(data)
    except ValueError as error:
        raise PayloadError(f"the profile is malformed: {error}") from error


def _packed(value: _Value) -> list[int]:
    if isinstance(value, int):
        return [value]
    numbers, position = [], 0
    try:
        while position < len(value):
            number, position = wire.read_varint(value, position)
            numbers.append(number)
    except ValueError as error:
        raise PayloadError(f"the profile is malformed: {error}") from error
    return numbers


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _number(value: _Value | None) -> int:
    return value if isinstance(value, int) else 0


def _message(value: _Value) -> bytes:
    return value if isinstance(value, bytes) else b""


def _integer(value: str | int | None) -> int:
    text = str(value or 0)
    return int(text) if text.isdecimal() and len(text) < 20 else 0
