"""Builds a request's dictionary, which contains each value in the request exactly once."""

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from otel_kprofiler.model import (
    STACK_TRUNCATED,
    TRUNCATED_STACKS,
    AddressRange,
    AttributeForm,
    AttributeValue,
    Form,
    Frame,
    Line,
    Module,
    ModuleKind,
    RawFrames,
    SideKind,
    SpanLink,
    Stack,
    StackStatus,
    UnnamedFrames,
    Unresolved,
    WindowSample,
)
from otel_kprofiler.otlp.conventions import (
    BPF_PROGRAM,
    BUILD_ID_GNU,
    BUILD_ID_HTLHASH,
    CPU,
    FOUND_BY,
    FRAME_TYPE,
    FUNCTION_START,
    LOCAL_ROOT,
    MODULE_BUILTIN,
    MODULE_KIND,
    STACK_STATUS,
    THREAD_ID,
    THREAD_NAME,
    UNRESOLVED,
)
from otel_kprofiler.otlp.wait_attributes import wait_attributes
from otel_kprofiler.otlp.wire import MASK_64
from otel_kprofiler.otlp.writer import (
    ATTRIBUTE,
    FUNCTION,
    LINK,
    LOCATION,
    MAPPING,
    STACK,
    STRING,
    KeyValue,
    Token,
    Writer,
)
from otel_kprofiler.speedups import FrameTokens
from otel_kprofiler.text import escape_surrogates

_Statuses = tuple[tuple[SideKind, StackStatus], ...]
"""The incomplete stacks (kernel, user, Python) in a sample, each with its status."""


_FunctionKey = tuple[str, str, str, int]


def status_text(status: StackStatus) -> str:
    """Returns a stack's status as text: why it is truncated, or the name or number of an errno."""
    if status == STACK_TRUNCATED:
        return "truncated"
    if status in TRUNCATED_STACKS:
        return TRUNCATED_STACKS[status].name.lower()
    return errno.errorcode.get(-status, str(status))


_NO_NAME: Final = Unresolved.NO_NAME
_MAX_INTEGER: Final = 1 << 63
"""Exclusive upper bound on integers in attributes (common.proto, ``AnyValue.int_value``)."""


def name_unnamed(module: Module | None, address: int, reason: Unresolved | None) -> str:
    """Returns the placeholder for a missing function name, such as ``vmlinux+0x1234 [no_symbol]``.

    For code not backed by a file, returns only the reason, because the address varies by process.
    """
    reason_text = f"[{reason.name.lower() if reason else 'unknown'}]"
    return f"{module.name.rpartition('/')[2]}+{address:#x} {reason_text}" if module else reason_text


def _has_name(line: Line) -> bool:
    return bool(line.function or line.system_name)


class Tables:
    """The serialized entries of the seven tables, except zero entries, and their total ``size``.

    ``tokens`` contains the tokens of each table's interned entries.
    """

    __slots__ = ("_first_tokens", "_token", "entries", "size", "tokens")

    def __init__(self, writer: Writer) -> None:
        self.entries: tuple[list[bytes], ...] = tuple([] for _ in range(7))
        self.tokens: tuple[dict[bytes, Token], ...] = tuple({} for _ in range(7))
        self._token = writer.token
        self._first_tokens = writer.first_tokens
        self.size = 0

    def add(self, table: int, entry: bytes) -> Token:
        """Add a new entry, and return its token."""
        entries = self.entries[table]
        entries.append(entry)
        self.size += len(entry)
        index, first_tokens = len(entries), self._first_tokens
        return first_tokens[index] if index < len(first_tokens) else self._token(index)

    def intern(self, table: int, entry: bytes) -> Token:
        """Returns the token of an encoded entry, after adding the entry if it is new."""
        known_tokens = self.tokens[table]
        token = known_tokens.get(entry)
        if token is None:
            entries = self.entries[table]  # inlined add(): saves a call for each new entry
            entries.append(entry)
            self.size += len(entry)
            index, first_tokens = len(entries), self._first_tokens
            token = first_tokens[index] if index < len(first_tokens) else self._token(index)
            known_tokens[entry] = token
        return token


class _RawLocations(dict[int, Token]):
    __slots__ = ("_attributes", "_lines", "_tables", "_writer")

    def __init__(
        self, tables: Tables, writer: Writer, lines: Sequence[tuple[Token, int]], attributes: bytes
    ) -> None:
        super().__init__()
        self._lines = lines
        self._tables = tables
        self._writer = writer
        self._attributes = attributes

    def __missing__(self, address: int) -> Token:
        if self._lines:
            entry = self._writer.location(b"", address, self._lines, self._attributes)
        else:
            entry = self._writer.raw_location(address, self._attributes)
        token = self[address] = self._tables.intern(LOCATION, entry)
        return token


class _ModuleMappings:
    """Tokens of a module's two mappings (with and without address range), created on first use."""

    __slots__ = ("end", "start", "tokens")

    def __init__(self, extent: AddressRange) -> None:
        self.start, self.end, _ = extent
        self.tokens = [b"", b""]


class Dictionary:
    """Interns values into the seven tables and serializes each entry once. Not thread-safe.

    Modules are looked up by identity first, so they must outlive the dictionary.
    """

    def __init__(
        self,
        writer: Writer,
        attribute_form: AttributeForm,
        unnamed_frames: UnnamedFrames = UnnamedFrames.ADDRESSES,
    ) -> None:
        self._writer = writer
        self._names_all = unnamed_frames is UnnamedFrames.NAMES
        self._is_simple = writer.form is Form.PROTOBUF and not self._names_all
        self._by_reference = attribute_form is AttributeForm.REFERENCES
        self.tables = Tables(writer)
        self._strings: dict[str, Token] = {"": b""}
        self._attributes: dict[type, dict[tuple[str, AttributeValue], Token]] = {str: {}, int: {}}
        self._functions: dict[_FunctionKey, Token] = {}
        self.frame_tokens: FrameTokens[Frame] = FrameTokens()
        self._raw: dict[tuple[SideKind, Unresolved], _RawLocations] = {}
        self._stacks: dict[Stack, Token] = {}
        self._mappings: dict[int, _ModuleMappings] = {}
        self._statuses: dict[Stack, _Statuses] = {}  # for incomplete stacks
        self._shortcuts: dict[tuple[object, ...], bytes] = {}
        self._frame_kinds: dict[tuple[object, ...], bytes] = {}

    def string(self, text: str) -> Token:
        """Returns the token of a string; the empty string has index 0."""
        token = self._strings.get(text)
        if token is None:
            cleaned = text if text.isascii() else escape_surrogates(text)
            if cleaned is not text and cleaned != text:
                token = self.string(cleaned)
            else:
                token = self.tables.add(STRING, self._writer.string(text))
            self._strings[text] = token
        return token

    def attribute(self, key: str, value: AttributeValue) -> Token:
        """Returns the token of an attribute without a unit."""
        tokens = self._attributes.get(type(value))  # 1 equals True
        token = tokens.get((key, value)) if tokens is not None else None
        if token is None:
            entry = self._writer.attribute(self.string(key), value)
            token = self.tables.intern(ATTRIBUTE, entry)
            if tokens is not None:
                tokens[key, value] = token
        return token

    def attributes(self, attributes: Mapping[str, AttributeValue]) -> bytes:
        """Returns the tokens of attributes, concatenated in order."""
        return self._join([self.attribute(*item) for item in attributes.items()])

    def link(self, link: SpanLink) -> Token:
        """Returns the token for a link."""
        return self.tables.intern(LINK, self._writer.link(link))

    def key_values(self, attributes: Iterable[tuple[str, AttributeValue]]) -> tuple[bytes, ...]:
        """Encode the attributes of a resource or scope, in order."""
        shortcuts = self._shortcuts  # most values are the same in all resources
        return tuple([shortcuts.get(item) or self._key_value(item) for item in attributes])

    def _key_value(self, item: tuple[str, AttributeValue]) -> bytes:
        key, value = item
        written = KeyValue(key, value)
        if self._by_reference:
            text = self.string(value) if isinstance(value, str) else b""
            written = KeyValue(key, value, self.string(key), text)
        entry = self._writer.key_value(written)
        if isinstance(value, str):  # as keys, 1, 1.0 and True are equal
            self._shortcuts[item] = entry
        return entry

    def add_samples(
        self,
        samples: Sequence[WindowSample],
        at: int,
        times: dict[bytes, bytes],
        sizes: list[int],
        *,
        size: int,
        limit: int,
    ) -> tuple[int, int, int]:
        """Add samples without values, from ``samples[at]`` to the first that is left to the caller.

        Returns the index of this sample, the new size, and the number of timestamps that were
        added. The other arguments are those of ``FrameTokens.add_samples``.
        """
        tables = self.tables
        at, size, added, count = self.frame_tokens.add_samples(
            samples, at, self._stacks, self._statuses, self._shortcuts, tables.entries[STACK],
            tables.tokens[STACK], times, sizes, size, tables.size, limit,
        )  # fmt: skip
        tables.size += added
        return at, size, count

    def sample_head(self, sample: WindowSample) -> bytes:
        """Encode a sample except for its timestamps and values."""
        stack, tid, thread_name, cpu, link, _, _, labels, wait = sample
        token = self._stacks.get(stack)
        if token is None:
            token = self._add_stack(stack)
        statuses = self._statuses.get(stack, ()) if self._statuses else ()
        root = link.local_root if link else ""
        shortcut = (tid, thread_name, cpu, statuses, root, labels, wait)
        attributes = self._shortcuts.get(shortcut)
        if attributes is None:
            attributes = self._shortcuts[shortcut] = self._sample_attributes(sample, statuses)
        return self._writer.sample_head(token, attributes, self.link(link) if link else b"")

    def _sample_attributes(self, sample: WindowSample, statuses: _Statuses) -> bytes:
        attributes: dict[str, AttributeValue] = {
            THREAD_NAME: sample.thread_name,
            THREAD_ID: sample.tid,
            CPU: sample.cpu,
        }
        if sample.link and sample.link.local_root:
            attributes[LOCAL_ROOT] = sample.link.local_root
        attributes |= sample.labels
        if sample.wait:
            attributes |= wait_attributes(sample.wait)
        for side, status in statuses:
            attributes[STACK_STATUS.format(side.name)] = status_text(status)
        return self._writer.sample_attributes(self.attributes(attributes))

    def _join(self, tokens: Iterable[Token]) -> bytes:
        return self._writer.separator.join(tokens)

    def _add_stack(self, stack: Stack) -> Token:
        """Returns the token for a stack; a stack without frames has index 0."""
        locations = self.frame_tokens.join(stack.sides, self._writer.separator, self.frame)
        if locations is None:
            locations = self._join(self._add_sides(stack))
        token = self.tables.intern(STACK, self._writer.stack(locations)) if locations else b""
        self._stacks[stack] = token
        return token

    def _add_sides(self, stack: Stack) -> Iterator[bytes]:
        """Yields the tokens of each side's frames, and keeps the statuses of incomplete sides."""
        separator = self._writer.separator
        for kind, frames, status, *_ in stack.sides:
            if frames:  # without frames, the attributes would never be referenced
                if isinstance(frames, RawFrames):
                    locations = self.raw_locations(frames)
                    yield self._join(map(locations.__getitem__, frames.addresses))
                else:
                    side = (kind, frames)
                    yield self.frame_tokens.join((side,), separator, self.frame) or b""
            if status:
                others = self._statuses.get(stack, ())
                self._statuses[stack] = (*others, (kind, status))

    def frame(self, frame: Frame) -> Token:
        """Returns the token of a frame's location."""
        token = self.frame_tokens.get(frame)
        if token is None:
            token = self.frame_tokens[frame] = self._add_frame(frame)
        return token

    def add_frames(self, frames: list[Frame]) -> None:
        """Add the locations of frames that differ only in their addresses, lines and offsets.

        The result is the same as that of :meth:`frame` for each frame.
        """
        self.frame(frames[0])  # adds the mapping and the attributes
        module, _, _, _, side, unresolved, builtin, found_by = frames[0]
        start, end, mapping = 0, MASK_64, b""
        if module:
            mappings = self._mappings[id(module)]
            start, end, mapping = mappings.start, mappings.end, mappings.tokens[True]
        attributes = self._shortcuts.get((side, unresolved, builtin, found_by, None))
        can_add = self._is_simple and unresolved is not _NO_NAME and (mapping or not module)
        functions, tables = self._functions, self.tables
        tokens, entries = tables.tokens[LOCATION], tables.entries[LOCATION]
        at = 0
        while at < len(frames):
            if attributes and can_add:
                at, size = self.frame_tokens.add_locations(
                    frames, at, start, end, mapping, attributes, functions, entries, tokens
                )
                tables.size += size
            if at < len(frames):
                self.frame(frames[at])
                at += 1

    def raw_locations(self, frames: RawFrames) -> Mapping[int, Token]:
        """Maps each raw address to the token of its location."""
        key = (frames.side, frames.reason)
        locations = self._raw.get(key)
        if locations is None:
            attributes = self._frame_attributes(*key)
            name = name_unnamed(None, 0, frames.reason)
            lines = self._lines((Line(name),)) if self._names_all else ()
            locations = self._raw[key] = _RawLocations(self.tables, self._writer, lines, attributes)
        return locations

    def _add_frame(self, frame: Frame) -> Token:
        module, address, lines, offset, side, unresolved, builtin, found_by = frame
        start = address - offset if unresolved is _NO_NAME and address < _MAX_INTEGER else None
        if self._names_all and not (lines and all(map(_has_name, lines))):
            name = name_unnamed(module, address if start is None else start, unresolved)
            lines = tuple(
                line if _has_name(line) else line._replace(function=name)
                for line in lines or (Line(""),)
            )
        mapping = b""
        if module:
            mappings = self._mappings.get(id(module))
            if mappings is None:
                mappings = self._mappings[id(module)] = _ModuleMappings(module.extent)
            inside = mappings.start <= address < mappings.end
            mapping = mappings.tokens[inside]
            if not mapping:
                mapping = self._add_mapping(module, inside=inside)
                mappings.tokens[inside] = mapping
        places = self._lines(lines) if lines else ()
        key = (side, unresolved, builtin, found_by, start)
        attributes = self._shortcuts.get(key)
        if attributes is None:
            attributes = self._shortcuts[key] = self._frame_attributes(*key)
        entry = self._writer.location(mapping, address, places, attributes)
        return self.tables.intern(LOCATION, entry)

    def _lines(self, lines: tuple[Line, ...]) -> list[tuple[Token, int]]:
        functions = self._functions
        places = []
        for function, system_name, file, number, start in lines:
            if function or system_name or file:
                key = (function, system_name, file, start)
                places.append((functions.get(key) or self._add_function(key), number))
        return places

    def _frame_attributes(
        self,
        side: SideKind,
        unresolved: Unresolved | None,
        builtin: tuple[str, ...] = (),
        found_by: str = "",
        start: int | None = None,
    ) -> bytes:
        key = (side, unresolved, builtin, found_by)
        tokens = self._frame_kinds.get(key)
        if tokens is None:
            attributes: dict[str, AttributeValue] = {FRAME_TYPE: side.frame_type}
            if builtin:
                attributes[MODULE_BUILTIN] = builtin if len(builtin) > 1 else builtin[0]
            usual = None if self._names_all else side.usual_reason
            if unresolved not in (None, usual):
                attributes[UNRESOLVED] = unresolved.name.lower()
            if found_by:
                attributes[FOUND_BY] = found_by
            tokens = self._frame_kinds[key] = self.attributes(attributes)
        if start is not None:
            tokens = self._join((tokens, self.attribute(FUNCTION_START, start)))
        return self._writer.location_attributes(tokens)

    def _add_mapping(self, module: Module, *, inside: bool) -> Token:
        """Returns the token for a module's mapping, including its range if ``inside`` is true."""
        extent = module.extent
        attributes: dict[str, AttributeValue] = {BUILD_ID_HTLHASH: module.file_id}
        if module.build_id:
            attributes[BUILD_ID_GNU] = module.build_id
        if module.kind in (ModuleKind.BPF, ModuleKind.OUT_OF_LINE):
            attributes[MODULE_KIND] = module.kind.value
        if module.program is not None:
            fields: tuple[str | int, ...] = module.program
            given = zip(BPF_PROGRAM, fields, strict=True)
            attributes |= {key: value for key, value in given if value}
        entry = self._writer.mapping(
            (extent.start, extent.end, module.file_offset) if inside else (0, 0, 0),
            self.string(module.name),
            self.attributes(attributes),
        )
        return self.tables.intern(MAPPING, entry)

    def _add_function(self, key: _FunctionKey) -> Token:
        name, system_name, file, start_line = key
        strings, string = self._strings, self.string
        entry = self._writer.function(
            strings.get(name) or string(name),
            strings.get(system_name) or string(system_name) if system_name else b"",
            strings.get(file) or string(file) if file else b"",
            start_line,
        )
        token = self._functions[key] = self.tables.intern(FUNCTION, entry)
        return token
