"""Decodes the dictionary of an OTLP message into model objects."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

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
    ProfileKind,
    SideKind,
    SpanLink,
    Stack,
    StackStatus,
    Unresolved,
    WindowWait,
)
from otel_kprofiler.otlp import conventions as names
from otel_kprofiler.otlp.sample_attributes import SampleAttributes, read_sample_attributes
from otel_kprofiler.otlp.shared_account import kind_key
from otel_kprofiler.otlp.values import Values, as_integer, as_text

_MAX_BUILTIN: Final = 100
"""Maximum number of built-in modules per frame."""

_MACHINE_CODE: Final = frozenset({"go", "rust"})
"""Frame types for machine code, in addition to those in ``SIDES``. Functions of these types belong
to modules rather than source files."""

_MODULE_KINDS: Final = {
    kind.value: kind for kind in (ModuleKind.VMLINUX, ModuleKind.BPF, ModuleKind.OUT_OF_LINE)
}

_REASONS: Final = {name.lower(): reason for name, reason in Unresolved.__members__.items()}

_Statuses = tuple[tuple[SideKind, StackStatus], ...]
Identity = tuple[Stack, int, str, int, SpanLink | None, LabelSet, WindowWait | None]
ProfileKey = tuple[ProfileKind, int, int, int]
"""The kind, period, start and end of a profile."""


class SharedValues:
    """Values shared by several messages. Each value is created once."""

    def __init__(self) -> None:
        self.modules: dict[Module, Module] = {}
        self.frames: dict[tuple[object, ...], Frame] = {}
        self.stacks: dict[tuple[object, ...], Stack] = {}
        self._sides = {side.frame_type: side for side in SIDES}
        self._sides[""] = USER_SIDE

    def side(self, frame_type: str) -> SideKind:
        """Returns the :class:`SideKind` for a frame type, creating a kind for an unknown type."""
        side = self._sides.get(frame_type)
        if side is None:
            has_files = frame_type not in _MACHINE_CODE
            side = SideKind(frame_type, frame_type, USER_SIDE.color, has_files=has_files)
            self._sides[frame_type] = side
        return side


def find_profile_kind(type_: str, unit: str, period_type: str, period_unit: str) -> ProfileKind:
    """Returns the kind with the given types and units, or a new kind if there is none."""
    unlisted = ProfileKind(type_, type_, unit, period_type, period_unit)
    for kind in KINDS:
        if kind._replace(name=type_, number=0) == unlisted:
            return kind
    return unlisted


class _Table(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        if index < 0:
            raise IndexError(index)
        return super().__getitem__(index)


class _FrameAttributes(NamedTuple):
    """Attributes of a location; ``start`` is the start address of an unnamed function, or None."""

    side: SideKind
    reason: str
    builtin: tuple[str, ...]
    found_by: str
    start: int | None


class Tables:
    """A message's dictionary, decoded into model values."""

    def __init__(self, dictionary: Any, shared: SharedValues) -> None:
        self.strings = _Table(dictionary.string_table or [""])
        self.values = Values(self.strings)
        self._shared = shared
        self._frame_attributes: dict[tuple[int, ...], _FrameAttributes] = {}
        self._by_index: dict[tuple[int, _Statuses], Stack] = {}
        self._taken: dict[tuple[int, ...], SampleAttributes] = {}
        self._links = _Table(
            SpanLink(link.trace_id, link.span_id) for link in dictionary.link_table
        )
        self._functions = _Table(dictionary.function_table)
        self._attributes = _Table(
            (self.strings[entry.key_strindex], self.values.read(entry.value))
            for entry in dictionary.attribute_table
        )
        modules = [self._module(entry) for entry in dictionary.mapping_table]
        self._modules = _Table([shared.modules.setdefault(module, module) for module in modules])
        users = [replace(module, kind=ModuleKind.USER) for module in modules]
        self._user_modules = _Table([shared.modules.setdefault(module, module) for module in users])
        self._frames = list(map(self._frame, dictionary.location_table))
        self._stacks = _Table(map(self._stack_frames, dictionary.stack_table))

    def attributes(self, indices: Iterable[int]) -> Mapping[str, AttributeValue]:
        """Returns the attributes with the given indices, by key."""
        return dict(self._attributes[index] for index in indices)

    def profile_key(self, profile: Any) -> ProfileKey:
        """Returns a profile's kind, period, start and end."""
        return (
            find_profile_kind(*kind_key(profile, self.strings)),
            profile.period,
            profile.time_unix_nano,
            profile.time_unix_nano + profile.duration_nano,
        )

    def identity(self, sample: Any) -> Identity:
        """Returns the properties of a sample, except its times and values."""
        indices = tuple(sample.attribute_indices)
        attributes = self._taken.get(indices)
        if attributes is None:
            attributes = self._taken[indices] = read_sample_attributes(self.attributes(indices))
        statuses, tid, thread_name, cpu, local_root, labels, wait = attributes
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
        """Equal frames from different messages are the same object."""
        indices = tuple(entry.attribute_indices)
        attributes = self._frame_attributes.get(indices)
        if attributes is None:
            attributes = self._frame_attributes[indices] = self._read_frame_attributes(indices)
        side, reason, builtin, found_by, start = attributes
        lines = tuple([self._line(line) for line in entry.lines]) if entry.lines else ()
        if lines and reason in _REASONS and lines[-1].function.endswith(f"[{reason}]"):
            lines = ()  # a placeholder: see UnnamedFrames
        module = None
        if entry.mapping_index:
            modules = self._modules if side is KERNEL_SIDE else self._user_modules
            module = modules[entry.mapping_index]
        key = (id(module), entry.address, lines, attributes)
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
