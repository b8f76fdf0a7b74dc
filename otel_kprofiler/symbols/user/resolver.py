"""Resolves user stacks to files, addresses and, if the symbols are loaded, function names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

from otel_kprofiler.model import (
    ADDRESS_BITS,
    IN_MOVED_TEXT,
    NO_MAPPING,
    SOURCE_BITS,
    USER_SIDE,
    AddressRange,
    FileDetails,
    FileKey,
    Frame,
    FrameSource,
    KnownFiles,
    Module,
    ModuleKind,
    OpenFile,
    ProcessKey,
    RawSample,
    RawSide,
    Segment,
    Side,
    Unresolved,
    mapping_fields,
    mark_trampolines,
    split_mappings,
)
from otel_kprofiler.speedups import FrameCache, FramePattern
from otel_kprofiler.symbols.resolver import Stateless
from otel_kprofiler.symbols.user.file import NOT_ASKED, NamedAddress

MAX_FRAMES_CACHED: Final = 8_192
"""Default limit on cached raw-stack words and frames. Frames are shared between processes; words
are not."""
MAX_MAPPINGS_CACHED: Final = 8_192
_PAGE_BYTES: Final = 4096
_WORD_MASK: Final = (1 << 64) - 1
_ADDRESS_MASK: Final = (1 << ADDRESS_BITS) - 1
_MOVED_TEXT: Final = "moved_text"
_FOUND_BY: Final[Mapping[int, str]] = {
    FrameSource.FRAME_POINTER: "frame_pointer",
    FrameSource.GUESS: "guess",
    FrameSource.DISASSEMBLY: "disassembly",
}
"""Names of unwind methods that may report the wrong caller."""
_METHODS: Final = tuple(
    _FOUND_BY.get(source & ~IN_MOVED_TEXT, _MOVED_TEXT if source & IN_MOVED_TEXT else "")
    for source in range(1 << 64 - SOURCE_BITS)
)
"""Names of unwind methods, by a word's source; empty if the caller is certain."""
_ADJUSTMENTS: Final = tuple(
    int(source & ~IN_MOVED_TEXT not in (FrameSource.REGISTERS, FrameSource.SIGNAL))
    for source in range(1 << 64 - SOURCE_BITS)
)
"""Bytes to subtract from a word's address, by its source: 1 from return addresses."""
_PENDING: Final = frozenset({Unresolved.FILE_UNKNOWN, Unresolved.SYMBOLS_PENDING})
_AWAITED: Final = frozenset({Unresolved.SYMBOLS_PENDING, Unresolved.SYMBOLS_DROPPED})


class UserNames(Protocol):
    """Provides function names for user code once they are loaded. Only ``finish`` may block.

    The thread that drains samples calls all methods except ``add``, which other threads call.
    """

    def add(
        self, key: FileKey, details: FileDetails, content: OpenFile | bytes, owner: int = 0
    ) -> None:
        """Queue a file with sampled code, and return immediately."""

    @property
    def version(self) -> int:
        """Returns a number that increases whenever a file is loaded or lookups must be repeated."""

    def name(self, key: FileKey, address: int) -> NamedAddress:
        """Returns the functions at an SVMA, or ``SYMBOLS_PENDING`` while the file is being read."""

    def name_code(self, process: ProcessKey, address: int, at_ns: int) -> NamedAddress:
        """Returns the functions at an address in non-file memory, as of boottime ``at_ns``."""

    def finish(self, timeout_s: float) -> None:
        """Wait for all pending symbols, for at most ``timeout_s``."""

    def close(self) -> None:
        """Release all resources; idempotent."""


class _KnownFile:
    def __init__(
        self, details: FileDetails, name: Callable[[int], NamedAddress] | None = None
    ) -> None:
        self.details = details
        self._name = name
        texts = tuple([
            (text.offset, text.size, text.address, make_module(details, text))
            for text in details.texts
        ])  # fmt: skip
        rest = (*NOT_ASKED[:2], USER_SIDE, NOT_ASKED.unresolved, (), "")
        self._frames = FramePattern(Frame, texts, make_module(details, None), rest)
        self.pattern = None if name else self._frames
        # The keys are file offsets; the source inverts upper bits if the caller may be wrong.
        self.final: FrameCache[Frame] = FrameCache()
        self._dropped: dict[int, Frame] = {}  # final until the next call of forget()
        # Frames whose names or source lines may still be read, used since the last call of
        # forget(), and last used before it.
        self._interim: dict[int, Frame] = {}
        self._earlier_interim: dict[int, Frame] = {}

    def frame(self, offset: int, source: int) -> tuple[Frame, bool]:
        """Returns the frame at a file offset with a word's source, and whether it is final.

        Outside segments, and in non-ELF files, uses the offset as the address (SVMA).
        """
        found_by = _METHODS[source]
        place = source << SOURCE_BITS ^ offset if found_by else offset
        frame = self.final.get(place) or self._dropped.get(place)
        if frame is not None:
            return frame, True
        module, address = self._frames.locate(offset)
        named = self._name(address) if self._name else NOT_ASKED
        interim = self._interim.get(place) or self._earlier_interim.get(place)
        if interim is not None and named.unresolved in _AWAITED:
            self._interim[place] = interim
            return interim, False
        fields = (
            module, address, named.lines, named.offset(address), USER_SIDE,
            named.unresolved, (), found_by,
        )  # fmt: skip
        frame = tuple.__new__(Frame, fields)  # takes half as long as Frame(…)
        if named.is_interim:
            self._interim[place] = frame
        elif named.unresolved is Unresolved.SYMBOLS_DROPPED:
            self._dropped[place] = frame
            return frame, True
        elif named.unresolved is not Unresolved.SYMBOLS_PENDING:
            self.final[place] = frame
            return frame, True
        return frame, False

    def forget(self) -> int:
        """Forget frames not used since the last call, and return the number of frames left.

        Repeats the lookup of one used frame, so that the symbols of its file remain loaded.
        """
        used = self.final.get_any() or next(iter(self._interim.values()), None)
        if self._name and used:
            self._name(used.address)
        self._dropped.clear()
        self._earlier_interim, self._interim = self._interim, {}
        return self.final.age() + len(self._earlier_interim)


class _Mapping(NamedTuple):
    file: _KnownFile | None
    bias: int
    reason: Unresolved

    def frame(self, word: int) -> tuple[Frame, bool]:
        """Returns the frame of a word, and whether it is final."""
        source = word >> SOURCE_BITS
        offset = (word & _ADDRESS_MASK) - _ADJUSTMENTS[source] - self.bias & _WORD_MASK
        if self.file is not None:
            return self.file.frame(offset, source)
        frame = Frame(None, offset, (), 0, USER_SIDE, self.reason, found_by=_METHODS[source])
        return frame, self.reason not in _PENDING


class _Words:
    """Caches frames by raw-stack word, for all raw stacks with the same mappings.

    Attributes:
        frames: the final frames.
        files: each mapping's file, as :meth:`FrameCache.find` needs them.
        pending: number of lookups whose frame may still gain a name or source lines.
        may_have_code: whether any frame has no file and may therefore be in runtime-generated code.
        has_signals: whether a signal interrupted any frame.
    """

    __slots__ = ("_mappings", "files", "frames", "has_signals", "may_have_code", "pending")

    def __init__(self, mappings: list[_Mapping], *, has_files: bool) -> None:
        # If there are too many mappings, a frame without a mapping may still be in a mapped file.
        is_complete = has_files and len(mappings) < NO_MAPPING
        outside = _Mapping(None, 0, Unresolved.NO_FILE if is_complete else Unresolved.USER_ADDRESS)
        self._mappings = mappings + [outside] * (NO_MAPPING + 1 - len(mappings))
        # A new process maps its files at new addresses, but most frames in these files are
        # already cached.
        self.files = tuple([
            (mapping.file.final, mapping.bias, mapping.file.pattern) if mapping.file else None
            for mapping in self._mappings
        ])  # fmt: skip
        self.frames: FrameCache[Frame] = FrameCache()
        self.pending = 0
        self.may_have_code = False
        self.has_signals = False

    def add(self, word: int) -> Frame:
        """Returns the frame of a word that neither its cache nor its file's cache contains."""
        frame, is_final = self._mappings[word >> ADDRESS_BITS & NO_MAPPING].frame(word)
        if frame.module is None:
            self.may_have_code = True
        if word >> SOURCE_BITS & ~IN_MOVED_TEXT == FrameSource.SIGNAL:
            self.has_signals = True
        if is_final:
            self.frames[word] = frame
        else:
            self.pending += 1
        return frame


class _PendingSide:
    """The user frames in a stack, some of whose files have not been read yet."""

    __slots__ = ("_raw", "_resolver", "_side", "_unknown", "_version")

    def __init__(
        self, resolver: UserResolver, raw: RawSide, version: int, side: Side, unknown: int
    ) -> None:
        self._resolver, self._raw = resolver, raw
        self._version, self._side, self._unknown = version, side, unknown

    def of(self, sample: RawSample) -> Side:
        """Returns the user stack with current names, reusing the object until a name is added."""
        version = self._resolver.version
        if self._unknown and version != self._version:
            self._version = version
            side, unknown = self._resolver.make_side(self._raw)
            if unknown < self._unknown or (unknown == self._unknown and side != self._side):
                self._side, self._unknown = side, unknown
        return self._side


class _SideWithCode:
    """The user frames in a stack. Names of frames outside any file depend on the process."""

    __slots__ = ("_last", "_names", "_side")

    def __init__(self, side: Side | _PendingSide, names: UserNames) -> None:
        self._side, self._names = side, names
        self._last: tuple[Side, tuple[NamedAddress, ...], Side] | None = None

    def of(self, sample: RawSample) -> Side:
        """Returns the user stack for the sample's process; the same object until a name changes."""
        side = self._side if isinstance(self._side, Side) else self._side.of(sample)
        process = sample.process
        named = tuple([
            self._names.name_code(process, frame.address, sample.time_ns)
            for frame in side.frames
            if _may_be_code(frame)
        ])  # fmt: skip
        if self._last is None or self._last[0] is not side or self._last[1] != named:
            self._last = side, named, _with_code(side, named)
        return self._last[2]


def _may_be_code(frame: Frame) -> bool:
    return frame.module is None and frame.unresolved is not Unresolved.FILE_UNKNOWN


def _with_code(side: Side, addresses: tuple[NamedAddress, ...]) -> Side:
    names = iter(addresses)
    frames = []
    is_provisional = side.is_provisional
    for frame in side.frames:
        if _may_be_code(frame):
            named = next(names)
            is_provisional |= named.unresolved is Unresolved.SYMBOLS_PENDING
            if named.unresolved is not Unresolved.NO_FILE:
                frame = frame._replace(  # noqa: PLW2901 - the same frame, named
                    lines=named.lines,
                    offset=named.offset(frame.address),
                    unresolved=named.unresolved,
                )
        frames.append(frame)
    return Side(USER_SIDE, tuple(frames), side.status, is_provisional)


class UserResolver(Stateless):
    """Resolves user stacks; never waits for files.

    Args:
        files: details of known files. The table store adds a file when its code is first sampled.
        names: looks up function names; closed when the resolver is closed. If None, frames are not
            symbolized.

    Attributes:
        tables: the frames of stacks that resolve to the same frames at all times, by mappings.
    """

    def __init__(
        self,
        files: KnownFiles,
        names: UserNames | None = None,
        max_frames: int = MAX_FRAMES_CACHED,
    ) -> None:
        self._known = files
        self._max_frames = max_frames
        self._names = names
        self._files: dict[FileKey, _KnownFile] = {}
        self._mapped: dict[tuple[int, int, int, int], _Mapping] = {}
        self._words: dict[bytes, _Words] = {}
        self.tables: dict[bytes, tuple[FrameCache[Frame], object]] = {}
        self._has_files = False  # stacks unwound by frame pointers alone refer to no files
        self._kept = 0  # number of mappings, plus frames kept after dropping older words
        self._left = max_frames  # number of further words until the cached ones are counted

    @property
    def version(self) -> int:
        """Returns a number that increases when a file is added or lookups must be repeated."""
        return self._known.version + (self._names.version if self._names else 0)

    def resolve(self, raw: RawSide, state: None) -> Side | _PendingSide | _SideWithCode:
        """Resolves a user stack.

        The result is provisional until all files in the stack are known.
        """
        version = self.version
        side, words = self._find(raw)
        unknown = words.pending
        resolved = _PendingSide(self, raw, version, side, unknown) if unknown else side
        if self._names and words.may_have_code and any(map(_may_be_code, side.frames)):
            return _SideWithCode(resolved, self._names)
        return resolved

    def count_found(self, words: int) -> None:
        """Limit the number of cached frames, counting words whose frames have been found."""
        self._left -= words
        if self._left < 0:
            self._limit()

    def make_side(self, raw: RawSide) -> tuple[Side, int]:
        """Returns the user stack with the latest names, and the number of frames awaiting names."""
        side, words = self._find(raw)
        return side, words.pending

    def _find(self, raw: RawSide) -> tuple[Side, _Words]:
        """Returns the user stack with the latest names, and the cache for the stack's mappings."""
        if self._left < 0:
            self._limit()
        if not self._has_files and self._known.version:
            self._has_files = True
            self._forget()
        stack = raw.words
        mappings, start = split_mappings(stack)
        cached = self._words.get(mappings)
        if cached is None:
            cached = self._map_all(mappings)
        cached.pending = 0
        frames = cached.frames.find(stack, start, cached.files, cached.add)
        if cached.has_signals:
            cached.pending = 0
            words = mark_trampolines(memoryview(stack)[start:].cast("Q"))
            frames = cached.frames.find(words.tobytes(), 0, cached.files, cached.add)
        if cached.has_signals or (cached.may_have_code and self._names):
            self.tables.pop(mappings, None)
        self._left -= len(frames)
        return Side(USER_SIDE, frames, raw.status, cached.pending > 0), cached

    def finish(self, timeout_s: float) -> None:
        """Wait for symbols that are being read."""
        if self._names:
            self._names.finish(timeout_s)

    def close(self) -> None:
        """Forget all frames."""
        self._forget()
        self._files.clear()
        if self._names:
            self._names.close()

    def _map_all(self, mappings: bytes) -> _Words:
        mapped = [self._map(fields) for fields in mapping_fields(mappings)]
        words = _Words(mapped, has_files=self._has_files)
        if all(mapping.file for mapping in mapped):
            self._words[mappings] = words
            self._kept += 1
            self._left -= 1
            if self._has_files:
                self.tables[mappings] = words.frames, words.files
        return words

    def _map(self, fields: tuple[int, int, int, int]) -> _Mapping:
        cached = self._mapped.get(fields)
        if cached is not None:
            return cached
        key, bias = FileKey(*fields[:3]), fields[3]
        details = self._known.get(key)
        if details is None:
            return _Mapping(None, 0, Unresolved.FILE_UNKNOWN)
        if self._names and details.may_be_generated:
            return _Mapping(None, 0, Unresolved.NO_FILE)
        if len(self._mapped) >= MAX_MAPPINGS_CACHED:
            self._forget()
        file = self._files.get(key)
        if file is None or file.details != details:
            names = self._names
            name = (lambda address: names.name(key, address)) if names else None
            file = self._files[key] = _KnownFile(details, name)
        mapping = self._mapped[fields] = _Mapping(file, bias, Unresolved.USER_ADDRESS)
        return mapping

    def _limit(self) -> None:
        """Forget words if there are too many. Counting takes as long as resolving a few stacks."""
        kept = self._kept + sum([len(words.frames) for words in self._words.values()])
        if kept >= self._max_frames:
            self._forget()
            kept = self._kept
        self._left = max(self._max_frames - kept, self._max_frames // 16)

    def _forget(self) -> None:
        self._words.clear()
        self.tables.clear()
        self._mapped.clear()
        left = {key: file.forget() for key, file in self._files.items()}
        self._kept = sum(left.values())
        if self._kept > self._max_frames // 2:
            self._kept = 0
            left.clear()
        self._files = {key: self._files[key] for key, count in left.items() if count}


def make_module(details: FileDetails, text: Segment | None) -> Module:
    """Returns a module for ``text``, rounded out to whole pages, or for the whole file if None."""
    ranges: tuple[AddressRange, ...] = ()
    file_offset = 0
    if text is not None:
        start = text.address & -_PAGE_BYTES
        end = text.address + text.size + _PAGE_BYTES - 1 & -_PAGE_BYTES
        ranges = (AddressRange(start, end, ""),)
        file_offset = text.offset - (text.address - start)
    return Module(
        name=details.name,
        kind=ModuleKind.USER,
        build_id=details.build_id,
        file_id=details.file_id,
        base=0,
        ranges=ranges,
        file_offset=file_offset,
    )
