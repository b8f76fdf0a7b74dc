"""Resolves user stacks to files and addresses in them, and to names where symbols are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
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
    split_user_stack,
)
from otel_kprofiler.symbols.resolver import Stateless
from otel_kprofiler.symbols.user.file import NOT_ASKED, NamedAddress

MAX_FRAMES_CACHED: Final = 8_192
"""Words of stacks, and frames of files kept from before. Processes come and go, each with other
words; the frames stay as long as they are used."""
MAX_MAPPINGS_CACHED: Final = 8_192
_PAGE_BYTES: Final = 4096
_WORD_MASK: Final = (1 << 64) - 1
_ADDRESS_MASK: Final = (1 << ADDRESS_BITS) - 1
_EXACT: Final = (int(FrameSource.REGISTERS), int(FrameSource.SIGNAL))
_FOUND_BY: Final[Mapping[int, str]] = {
    FrameSource.FRAME_POINTER: "frame_pointer",
    FrameSource.GUESS: "guess",
}
"""Ways of finding a frame that are not proof."""
_MOVED_TEXT: Final = "moved_text"
_PENDING: Final = frozenset({Unresolved.FILE_UNKNOWN, Unresolved.SYMBOLS_PENDING})


class UserNames(Protocol):
    """Names of user code, as far as they are loaded; methods never wait except for ``finish``.

    Called by the thread that drains samples, ``add`` by any other.
    """

    def add(
        self, key: FileKey, details: FileDetails, content: OpenFile | bytes, owner: int = 0
    ) -> None:
        """Take a file that code was sampled in; see :data:`FileReader`."""

    @property
    def version(self) -> int:
        """Grows whenever more is known."""

    def name(self, key: FileKey, address: int) -> NamedAddress:
        """The functions at an address (SVMA) of a file; ``SYMBOLS_PENDING`` while it is read."""

    def name_code(self, process: ProcessKey, address: int, at_ns: int) -> NamedAddress:
        """Names an address of a process that lies in no file, at a boot time."""

    def finish(self, timeout_s: float) -> None:
        """Wait until all that was asked for is known, for at most ``timeout_s``."""

    def close(self) -> None:
        """Release all resources; idempotent."""


class _KnownFile:
    """A file with one module for each of its segments."""

    def __init__(
        self, details: FileDetails, name: Callable[[int], NamedAddress] | None = None
    ) -> None:
        self.details = details
        self._name = name
        self._whole = make_module(details, None)
        self._parts = [(text, make_module(details, text)) for text in details.texts]
        # By offset, or a tuple where it is not proof. Those used lately, and before.
        self._frames: dict[int | tuple[int, str], Frame] = {}
        self._earlier: dict[int | tuple[int, str], Frame] = {}

    def frame(self, offset: int, found_by: str) -> Frame:
        """The frame at an offset in the file, the same one for all processes.

        Its address (SVMA) is that of the segment. Where nothing of the file is loaded by its
        headers, and in files that are not ELF, the offset stands for the address.
        """
        key = (offset, found_by) if found_by else offset
        frame = self._frames.get(key)
        if frame is None:
            earlier = self._earlier.get(key)
            if earlier is not None and earlier.unresolved is not Unresolved.SYMBOLS_DROPPED:
                frame = self._frames[key] = earlier
        if frame is None or frame.unresolved is Unresolved.SYMBOLS_PENDING:
            module, address = self._whole, offset
            for text, part in self._parts:
                if 0 <= offset - text.offset < text.size:
                    module, address = part, text.address + offset - text.offset
            named = self._name(address) if self._name else NOT_ASKED
            frame = Frame(
                module, address, named.lines, named.offset(address), USER_SIDE, named.unresolved,
                found_by=found_by,
            )  # fmt: skip
            self._frames[key] = frame
        return frame

    def forget(self) -> int:
        """Forget frames that were not used since the last call; returns how many are left.

        Looks up one of its names again, so that the symbols of a file in use stay loaded.
        """
        if self._name and self._frames:
            self._name(next(iter(self._frames.values())).address)
        self._earlier, self._frames = self._frames, {}
        return len(self._earlier)


class _Mapping(NamedTuple):
    """A file at a place in memory; or memory without a known file, for that reason."""

    file: _KnownFile | None
    bias: int
    reason: Unresolved

    def frame(self, word: int) -> Frame:
        """The frame that a word of a stack stands for."""
        source, is_moved = word >> SOURCE_BITS & ~IN_MOVED_TEXT, word >> SOURCE_BITS & IN_MOVED_TEXT
        place = (word & _ADDRESS_MASK) - (source not in _EXACT) - self.bias & _WORD_MASK
        found_by = _FOUND_BY.get(source, _MOVED_TEXT if is_moved else "")
        if self.file is not None:
            return self.file.frame(place, found_by)
        return Frame(None, place, (), 0, USER_SIDE, self.reason, found_by=found_by)


class _Words(dict[int, Frame]):
    """Frames of all stacks with the same mappings, by the words that stand for them.

    Attributes:
        pending: how many look-ups found a frame of which more may be known later.
        may_have_code: whether a word has a frame in no file.
    """

    __slots__ = ("_mappings", "may_have_code", "pending")

    def __init__(self, mappings: list[_Mapping], *, has_files: bool) -> None:
        super().__init__()
        # With too many, a frame without a mapping may have a file nevertheless.
        is_complete = has_files and len(mappings) < NO_MAPPING
        outside = _Mapping(None, 0, Unresolved.NO_FILE if is_complete else Unresolved.USER_ADDRESS)
        self._mappings = mappings + [outside] * (NO_MAPPING + 1 - len(mappings))
        self.pending = 0
        self.may_have_code = False

    def __missing__(self, word: int) -> Frame:
        frame = self._mappings[word >> ADDRESS_BITS & NO_MAPPING].frame(word)
        if frame.module is None:
            self.may_have_code = True
        if frame.unresolved in _PENDING:
            self.pending += 1
        else:
            self[word] = frame
        return frame


class _PendingSide:
    """A side with files that are not known yet; better whenever more of them are."""

    __slots__ = ("_raw", "_resolver", "_side", "_unknown", "_version")

    def __init__(
        self, resolver: UserResolver, raw: RawSide, version: int, side: Side, unknown: int
    ) -> None:
        self._resolver, self._raw = resolver, raw
        self._version, self._side, self._unknown = version, side, unknown

    def of(self, sample: RawSample) -> Side:
        """The side as far as its files are known now; the same object until more are."""
        version = self._resolver.version
        if self._unknown and version != self._version:
            self._version = version
            side, unknown = self._resolver.make_side(self._raw)
            if unknown < self._unknown:
                self._side, self._unknown = side, unknown
        return self._side


class _SideWithCode:
    """A side with frames in memory without a file, which each process names for itself."""

    __slots__ = ("_last", "_names", "_side")

    def __init__(self, side: Side | _PendingSide, names: UserNames) -> None:
        self._side, self._names = side, names
        self._last: tuple[Side, tuple[NamedAddress, ...], Side] | None = None

    def of(self, sample: RawSample) -> Side:
        """The side of a process; the same object while it has the same names."""
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
    """Returns whether it is in no file, as far as the stack shows."""
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
                frame = replace(  # noqa: PLW2901 - the same frame, named
                    frame,
                    lines=named.lines,
                    offset=named.offset(frame.address),
                    unresolved=named.unresolved,
                )
        frames.append(frame)
    return Side(USER_SIDE, tuple(frames), side.status, is_provisional)


class UserResolver(Stateless):
    """Resolves the user side of stacks from what is known about files; never waits for them.

    A stack names its files itself.

    Args:
        known: filled by the store of tables as the files are met.
        names: names of their functions; None: frames are addresses. Closed with the resolver.
    """

    def __init__(self, files: KnownFiles, names: UserNames | None = None) -> None:
        self._known = files
        self._names = names
        self._files: dict[FileKey, _KnownFile] = {}
        self._mapped: dict[tuple[int, int, int, int], _Mapping] = {}
        self._words: dict[bytes, _Words] = {}
        self._has_files = False  # by frame pointers alone, stacks have none
        self._kept = 0  # words, each with a frame at most, and frames from before

    @property
    def version(self) -> int:
        """Grows whenever more is known of a file."""
        return self._known.version + (self._names.version if self._names else 0)

    def resolve(self, raw: RawSide, state: None) -> Side | _PendingSide | _SideWithCode:
        """The frames of a user stack; provisional while one of its files is not known."""
        version = self.version
        side, words = self._find(raw)
        unknown = words.pending
        resolved = _PendingSide(self, raw, version, side, unknown) if unknown else side
        if self._names and words.may_have_code and any(map(_may_be_code, side.frames)):
            return _SideWithCode(resolved, self._names)
        return resolved

    def make_side(self, raw: RawSide) -> tuple[Side, int]:
        """The side as far as its files are known, and how many of its frames may be better."""
        side, words = self._find(raw)
        return side, words.pending

    def _find(self, raw: RawSide) -> tuple[Side, _Words]:
        """The side as far as its files are known, and the words of its mappings."""
        if self._kept >= MAX_FRAMES_CACHED:
            self._forget()
        if not self._has_files and self._known.version:
            self._has_files = True
            self._forget()
        _, mappings, words = split_user_stack(raw.words)
        cached = self._words.get(mappings)
        if cached is None:
            cached = self._map_all(mappings)
        cached.pending, old_count = 0, len(cached)
        frames = tuple(map(cached.__getitem__, words))
        self._kept += len(cached) - old_count
        return Side(USER_SIDE, frames, raw.status, is_provisional=cached.pending > 0), cached

    def advance(self, now_boot_ns: int) -> int:
        """Nothing to wait for: files that become known later complete provisional sides."""
        return now_boot_ns

    def finish(self, timeout_s: float) -> None:
        """Wait for the symbols that are being read."""
        if self._names:
            self._names.finish(timeout_s)

    def close(self) -> None:
        """Forget all frames."""
        self._forget()
        self._files.clear()
        if self._names:
            self._names.close()

    def _map_all(self, mappings: bytes) -> _Words:
        """The frames of the mappings of a stack; kept if all of their files are known."""
        mapped = [self._map(fields) for fields in mapping_fields(mappings)]
        words = _Words(mapped, has_files=self._has_files)
        if all(mapping.file for mapping in mapped):
            self._words[mappings] = words
            self._kept += 1
        return words

    def _map(self, fields: tuple[int, int, int, int]) -> _Mapping:
        """A mapping; kept if its file is known."""
        cached = self._mapped.get(fields)
        if cached is not None:
            return cached
        key, bias = FileKey(*fields[:3]), fields[3]
        details = self._known.get(key)
        if details is None:
            return _Mapping(None, 0, Unresolved.FILE_UNKNOWN)
        if len(self._mapped) >= MAX_MAPPINGS_CACHED:
            self._forget()
        file = self._files.get(key)
        if file is None or file.details != details:
            names = self._names
            name = (lambda address: names.name(key, address)) if names else None
            file = self._files[key] = _KnownFile(details, name)
        mapping = self._mapped[fields] = _Mapping(file, bias, Unresolved.USER_ADDRESS)
        return mapping

    def _forget(self) -> None:
        """Forget all places of files in memory, and frames that were not used of late."""
        self._words.clear()
        self._mapped.clear()
        left = {key: file.forget() for key, file in self._files.items()}
        self._kept = sum(left.values())
        if self._kept > MAX_FRAMES_CACHED // 2:
            self._kept = 0
            left.clear()
        self._files = {key: self._files[key] for key, count in left.items() if count}


def make_module(details: FileDetails, text: Segment | None) -> Module:
    """The module of a segment, in whole pages as it is mapped; of the whole file if None."""
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
