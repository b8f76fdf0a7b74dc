"""Decodes OTLP profiles into windows: our own payloads, and those of peers and Collectors.

Defaults replace what the wire does not carry: frames have offset 0, modules base 0, a side of a
stack without a status is complete, or was not collected if it has no frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import (
    KERNEL_SIDE,
    KINDS,
    SIDES,
    USER_SIDE,
    AddressRange,
    AttributeValue,
    BpfProgram,
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
    SideKind,
    SpanLink,
    Stack,
    StackStatus,
    Unresolved,
    WaitTotals,
    Window,
    WindowSample,
    WindowWait,
)
from otel_kprofiler.otlp import conventions as names
from otel_kprofiler.otlp.account import parse_account
from otel_kprofiler.otlp.payloads import (
    DamagedProfilesError,
    OnDamage,
    TruncatedError,
    parse_payloads,
    read_file,
)
from otel_kprofiler.otlp.sample_attributes import (
    SampleAttributes,
    as_integer,
    read_sample_attributes,
)
from otel_kprofiler.otlp.values import Values, as_text
from otel_kprofiler.otlp.wait_attributes import parse_totals

_MAX_BUILTIN: Final = 100
"""Limit of the modules of a frame; real code has one, rarely a few."""

_MACHINE_CODE: Final = frozenset({"go", "rust"})
"""Types of frames whose functions belong to modules, besides those of our sides."""

_MODULE_KINDS: Final = {
    kind.value: kind for kind in (ModuleKind.VMLINUX, ModuleKind.BPF, ModuleKind.OUT_OF_LINE)
}

_REASONS: Final = {name.lower(): reason for name, reason in Unresolved.__members__.items()}

_Statuses = tuple[tuple[SideKind, StackStatus], ...]
_ResourceKey = tuple[object, ...]
_Identity = tuple[Stack, int, str, int, SpanLink | None, LabelSet, WindowWait | None]
_ProfileKey = tuple[ProfileKind, int, int, int]
"""Kind, period, start and end."""
_ProfileSamples = dict[_ResourceKey, dict[_Identity, "_Series"]]


def read_profiles(path: str) -> list[Window]:
    """Decode the windows of a file: one message, length-prefixed messages, or JSON lines.

    A truncated last line or message is ignored.

    Raises:
        PayloadError: the file is not OTLP profiles.
        OSError: it cannot be read.
    """
    return decode_windows(read_file(path))


def _allow_truncated(error: PayloadError) -> None:
    if not isinstance(error, TruncatedError):
        raise error


def decode_windows(
    data: bytes | Iterable[bytes], *, on_damage: OnDamage = _allow_truncated
) -> list[Window]:
    """Decode serialized requests in any form; the parts of a window are merged.

    Args:
        data: one message or file as bytes, or several of them.
        on_damage: called for each message that cannot be read, or not to its end; what can be
            read of it counts if this returns. By default, only the last may be truncated.

    Raises:
        PayloadError: the data is not OTLP profiles, has the layout before 1.43, or exceeds a limit:
            ``MAX_MESSAGE_BYTES``, ``MAX_WRITTEN_CHARS``.
    """
    decoder = _Decoder()
    for piece in [data] if isinstance(data, bytes) else data:
        for payload in parse_payloads(piece, on_damage):
            try:
                decoder.add(payload.message)
            except PayloadError as error:
                on_damage(error)
    return decoder.windows()


@contextmanager
def _indices_checked() -> Iterator[None]:
    try:
        yield
    except IndexError as error:
        raise PayloadError(
            "an index points outside of its table", hint="see `otel-kprofiler check FILE`"
        ) from error


class _Decoder:
    """Collects windows from several messages, which share equal values."""

    def __init__(self) -> None:
        self._profiles: dict[_ProfileKey, _ProfileSamples] = {}
        self._accounts: dict[_ProfileKey, dict[str, AttributeValue]] = {}
        self._waits: dict[tuple[_ProfileKey, _ResourceKey], WaitTotals] = {}
        self._resources: dict[_ResourceKey, Resource] = {}
        self.modules: dict[Module, Module] = {}
        self.frames: dict[tuple[object, ...], Frame] = {}
        self.stacks: dict[tuple[object, ...], Stack] = {}
        self._sides = {side.frame_type: side for side in SIDES}
        self._sides[""] = USER_SIDE

    def side(self, frame_type: str) -> SideKind:
        """The side of a type of frames; one of its own for a type that we have none of."""
        found = self._sides.get(frame_type)
        if found is None:
            has_files = frame_type not in _MACHINE_CODE
            found = SideKind(frame_type, frame_type, USER_SIDE.color, has_files=has_files)
            self._sides[frame_type] = found
        return found

    def add(self, message: Any) -> None:
        """Add all that can be read of a message; raises an error if that is not all."""
        with _indices_checked():
            tables = _Tables(message.dictionary, self)
        problems: list[PayloadError] = []
        for resource_profiles in message.resource_profiles:
            with _indices_checked():
                resource = self._resource(resource_profiles, tables.values)
            for scope_profiles in resource_profiles.scope_profiles:
                for profile in scope_profiles.profiles:
                    try:
                        with _indices_checked():
                            self._add(profile, resource, tables)
                    except PayloadError as error:
                        problems.append(error)
        if problems:
            raise DamagedProfilesError(problems[0], len(problems))

    def _add(self, profile: Any, resource: _ResourceKey, tables: _Tables) -> None:
        key = tables.profile_key(profile)
        if profile.attribute_indices:
            attributes = tables.attributes(profile.attribute_indices)
            self._accounts.setdefault(key, {}).update(attributes)
            if waits := parse_totals(attributes):
                self._waits[key, resource] = waits
        samples = self._profiles.setdefault(key, {}).setdefault(resource, {})
        for sample in profile.samples:
            identity = tables.identity(sample)
            series = samples.get(identity)
            if series is None:
                series = samples[identity] = _Series()
            series.add(profile, sample)

    def _resource(self, resource_profiles: Any, values: Values) -> _ResourceKey:
        attributes = dict(values.read_all(resource_profiles.resource.attributes))
        typed = sorted((key, type(value).__name__, value) for key, value in attributes.items())
        key = (resource_profiles.schema_url, *typed)
        if key not in self._resources:
            self._resources[key] = Resource(attributes, resource_profiles.schema_url)
        return key

    def windows(self) -> list[Window]:
        """Windows of equal intervals are one, unless a kind is in both."""
        found: dict[tuple[int, int], list[list[Profile]]] = {}
        for key, resources in self._profiles.items():
            kind, period, start, end = key
            account = parse_account(self._accounts.get(key, {}))
            profile = Profile(kind, period, self._groups(key, resources), *account)
            groups = found.setdefault((start, end), [])
            for group in groups:
                if all(other.kind != kind for other in group):
                    group.append(profile)
                    break
            else:
                groups.append([profile])
        return [_window(*key, group) for key, groups in found.items() for group in groups]

    def _groups(self, key: _ProfileKey, resources: _ProfileSamples) -> list[ResourceSamples]:
        return [
            ResourceSamples(
                self._resources[resource],
                [
                    WindowSample(*identity[:5], series.times, series.values, *identity[5:])
                    for identity, series in samples.items()
                    if series.times
                ],
                self._waits.get((key, resource)),
            )
            for resource, samples in resources.items()
            if (key, resource) in self._waits or any(one.times for one in samples.values())
        ]


def _window(start: int, end: int, profiles: list[Profile]) -> Window:
    """A window extended to include all its samples; a peer's profile may be narrower."""
    for profile in profiles:
        for group in profile.resources:
            for sample in group.samples:
                start = min(start, *sample.timestamps_unix_ns)
                end = max(end, max(sample.timestamps_unix_ns) + 1)
    return Window(start, end, profiles)


def find_profile_kind(type_: str, unit: str, period_type: str, period_unit: str) -> ProfileKind:
    """The kind with these types; one of its own for what we do not sample."""
    found = ProfileKind(type_, type_, unit, period_type, period_unit)
    for kind in KINDS:
        if kind._replace(name=type_, number=0) == found:
            return kind
    return found


class _Series:
    """Timestamps and values of equal samples; values stay empty while each is 1."""

    __slots__ = ("times", "values")

    def __init__(self) -> None:
        self.times: list[int] = []
        self.values: list[int] = []

    def add(self, profile: Any, sample: Any) -> None:
        """Add a sample; an aggregated value gets the start time of its profile."""
        times, values = list(sample.timestamps_unix_nano), list(sample.values)
        if times and not (values or self.values):
            self.times += times
            return
        if not times:
            if not values:
                raise PayloadError("a sample has neither timestamps nor values")
            if not any(values):
                return  # it counts nothing
            times, values = [profile.time_unix_nano], [sum(values)]
        if values and len(values) != len(times):
            raise PayloadError(f"a sample has {len(times)} timestamps, but {len(values)} values")
        if values.count(1) == len(values):
            values = []
        if values and not self.values:
            self.values = [1] * len(self.times)
        if values or self.values:
            self.values += values or [1] * len(times)
        self.times += times


class _Table(list[Any]):
    """A table that rejects negative indices."""

    def __getitem__(self, index: Any) -> Any:
        if index < 0:
            raise IndexError(index)
        return super().__getitem__(index)


class _FrameAttributes(NamedTuple):
    """Attributes of a location.

    Attributes:
        side: of stacks.
        reason: why it has no name; empty if that is not said.
        builtin: modules that its code would be in, were it not built in.
        found_by: how it was found, if that is no proof.
        start: where its function starts, if it has no name; None if that is not known.
    """

    side: SideKind
    reason: str
    builtin: tuple[str, ...]
    found_by: str
    start: int | None


class _Tables:
    """The dictionary of one message as model values."""

    def __init__(self, dictionary: Any, shared: _Decoder) -> None:
        self.strings = _Table(dictionary.string_table or [""])
        self.values = Values(self.strings)
        self._shared = shared
        self._frame_attributes: dict[tuple[int, ...], _FrameAttributes] = {}
        self._by_index: dict[tuple[int, _Statuses], Stack] = {}
        self._taken: dict[tuple[int, ...], SampleAttributes] = {}
        self._links = _Table(SpanLink(one.trace_id, one.span_id) for one in dictionary.link_table)
        self._functions = _Table(dictionary.function_table)
        self._attributes = _Table(
            (self.strings[entry.key_strindex], self.values.read(entry.value))
            for entry in dictionary.attribute_table
        )
        modules = [self._module(entry) for entry in dictionary.mapping_table]
        self._modules = _Table([shared.modules.setdefault(one, one) for one in modules])
        users = [replace(one, kind=ModuleKind.USER) for one in modules]
        self._user_modules = _Table([shared.modules.setdefault(one, one) for one in users])
        self._frames = list(map(self._frame, dictionary.location_table))
        self._stacks = _Table(map(self._stack_frames, dictionary.stack_table))

    def attributes(self, indices: Iterable[int]) -> Mapping[str, AttributeValue]:
        return dict(self._attributes[index] for index in indices)

    def profile_key(self, profile: Any) -> _ProfileKey:
        strings, kind, period = self.strings, profile.sample_type, profile.period_type
        return (
            find_profile_kind(
                strings[kind.type_strindex],
                strings[kind.unit_strindex],
                strings[period.type_strindex],
                strings[period.unit_strindex],
            ),
            profile.period,
            profile.time_unix_nano,
            profile.time_unix_nano + profile.duration_nano,
        )

    def identity(self, sample: Any) -> _Identity:
        indices = tuple(sample.attribute_indices)
        found = self._taken.get(indices)
        if found is None:
            found = self._taken[indices] = read_sample_attributes(self.attributes(indices))
        statuses, tid, thread_name, cpu, local_root, labels, wait = found
        stack_key = (sample.stack_index, statuses)
        stack = self._by_index.get(stack_key)
        if stack is None:
            stack = self._by_index[stack_key] = self._stack(*stack_key)
        link = self._links[sample.link_index] if sample.link_index else None
        if link is not None and local_root:
            link = link._replace(local_root=local_root)
        return stack, tid, thread_name, cpu, link, labels, wait

    def _stack(self, index: int, statuses: _Statuses) -> Stack:
        frames: tuple[Frame, ...] = self._stacks[index]
        stack_key = (statuses, *map(id, frames))
        stack = self._shared.stacks.get(stack_key)
        if stack is None:
            made = Stack.from_frames(frames, dict(statuses))
            stack = self._shared.stacks[stack_key] = made
        return stack

    def _module(self, entry: Any) -> Module:
        attributes = self.attributes(entry.attribute_indices)
        name = self.strings[entry.filename_strindex]
        kind_name = as_text(attributes.get(names.MODULE_KIND, name))
        build_id = as_text(attributes.get(names.BUILD_ID_GNU, ""))
        extent = AddressRange(entry.memory_start, entry.memory_limit, "")
        return Module(
            name=name,
            kind=_MODULE_KINDS.get(kind_name, ModuleKind.LOADED),
            build_id=BuildId(build_id) if build_id else None,
            file_id=FileId(as_text(attributes.get(names.BUILD_ID_HTLHASH, ""))),
            base=0,
            ranges=(extent,) if extent.end else (),
            program=_program([attributes.get(key, "") for key in names.BPF_PROGRAM]),
            file_offset=entry.file_offset,
        )

    def _stack_frames(self, entry: Any) -> tuple[Frame, ...]:
        indices, frames = entry.location_indices, self._frames
        if indices and min(indices) < 0:
            raise IndexError(min(indices))
        return tuple([frames[index] for index in indices])

    def _frame(self, entry: Any) -> Frame:
        """The frame of a location; equal ones of all messages are one, made only once."""
        indices = tuple(entry.attribute_indices)
        found = self._frame_attributes.get(indices)
        if found is None:
            found = self._frame_attributes[indices] = self._read_frame_attributes(indices)
        side, reason, builtin, found_by, start = found
        lines = tuple([self._line(line) for line in entry.lines]) if entry.lines else ()
        if lines and reason in _REASONS and lines[-1].function.endswith(f"[{reason}]"):
            lines = ()  # a name that is none: see UnnamedFrames
        module = None
        if entry.mapping_index:
            modules = self._modules if side is KERNEL_SIDE else self._user_modules
            module = modules[entry.mapping_index]
        key = (id(module), entry.address, lines, found)
        frame = self._shared.frames.get(key)
        if frame is None:
            unresolved, offset = None, 0
            if not lines:
                missing = Unresolved.NO_SYMBOL if module else Unresolved.UNMAPPED
                unresolved = _REASONS.get(reason, side.usual_reason or missing)
                if unresolved is Unresolved.NO_NAME and start is not None:
                    offset = max(0, entry.address - start)
            frame = self._shared.frames[key] = Frame(
                module, entry.address, lines, offset, side, unresolved, builtin, found_by
            )
        return frame

    def _read_frame_attributes(self, indices: Iterable[int]) -> _FrameAttributes:
        attributes = self.attributes(indices)
        builtin = attributes.get(names.MODULE_BUILTIN, ())
        start = attributes.get(names.FUNCTION_START)
        return _FrameAttributes(
            self._shared.side(as_text(attributes.get(names.FRAME_TYPE, ""))),
            as_text(attributes.get(names.UNRESOLVED, "")),
            tuple(map(str, builtin[:_MAX_BUILTIN] if isinstance(builtin, tuple) else [builtin])),
            as_text(attributes.get(names.FOUND_BY, "")),
            start if type(start) is int else None,
        )

    def _line(self, line: Any) -> Line:
        entry = self._functions[line.function_index]
        return Line(
            self.strings[entry.name_strindex],
            self.strings[entry.system_name_strindex],
            self.strings[entry.filename_strindex],
            line.line,
            entry.start_line,
        )


def _program(fields: Sequence[AttributeValue]) -> BpfProgram | None:
    if not any(fields):
        return None
    number, kind, tag, load_time_ns, attached_to = fields
    return BpfProgram(
        as_integer(number),
        as_text(kind),
        as_text(tag),
        as_integer(load_time_ns),
        as_text(attached_to),
    )
