"""Resolves user stacks to files and addresses in them, as symbol stores look them up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from otel_kprofiler.model import (
    ADDRESS_BITS,
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
    RawSample,
    RawSide,
    Segment,
    Side,
    Unresolved,
    split_user_stack,
)

MAX_FRAMES_CACHED: Final = 16_384
MAX_MAPPINGS_CACHED: Final = 8_192
_PAGE_BYTES: Final = 4096
_WORD_MASK: Final = (1 << 64) - 1
_ADDRESS_MASK: Final = (1 << ADDRESS_BITS) - 1
_FRAME_MASK: Final = _WORD_MASK ^ NO_MAPPING << ADDRESS_BITS
_EXACT: Final = (int(FrameSource.REGISTERS), int(FrameSource.SIGNAL))
_FOUND_BY: Final[Mapping[int, str]] = {
    FrameSource.FRAME_POINTER: "frame_pointer",
    FrameSource.GUESS: "guess",
}
"""Ways of finding a frame that are no proof."""


class _KnownFile:
    """A file with one module for each of its segments."""

    def __init__(self, details: FileDetails) -> None:
        self.details = details
        self._whole = _make_module(details, None)
        self._parts = [(text, _make_module(details, text)) for text in details.texts]
        self._frames: dict[tuple[int, str], Frame] = {}

    def frame(self, offset: int, found_by: str) -> Frame:
        """The frame at an offset in the file, the same one for all processes.

        Its address (SVMA) is that of the segment. Where nothing of the file is loaded by its
        headers, and in files that are not ELF, the offset stands for the address.
        """
        frame = self._frames.get((offset, found_by))
        if frame is None:
            module, address = self._whole, offset
            for text, part in self._parts:
                if 0 <= offset - text.offset < text.size:
                    module, address = part, text.address + offset - text.offset
            reason = Unresolved.USER_ADDRESS
            frame = Frame(module, address, (), 0, USER_SIDE, reason, found_by=found_by)
            self._frames[offset, found_by] = frame
        return frame


class _Frames(dict[int, Frame]):
    """Frames of a mapping by the words that stand for them, without the mapping's index."""

    __slots__ = ("_bias", "_file", "_reason")

    def __init__(self, file: _KnownFile | None, bias: int, reason: Unresolved) -> None:
        super().__init__()
        self._file, self._bias, self._reason = file, bias, reason

    @property
    def is_unknown(self) -> bool:
        """Whether they lie in a file that is not known."""
        return self._reason is Unresolved.FILE_UNKNOWN

    def __missing__(self, word: int) -> Frame:
        source = word >> SOURCE_BITS
        place = (word & _ADDRESS_MASK) - (source not in _EXACT) - self._bias & _WORD_MASK
        found_by = _FOUND_BY.get(source, "")
        if self._file is not None:
            frame = self._file.frame(place, found_by)
        else:
            frame = Frame(None, place, (), 0, USER_SIDE, self._reason, found_by=found_by)
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

    def at(self, time_ns: int) -> Side:
        """The side as far as its files are known now; the same object until more are."""
        version = self._resolver.version
        if self._unknown and version != self._version:
            self._version = version
            side, unknown = self._resolver.make_side(self._raw)
            if unknown < self._unknown:
                self._side, self._unknown = side, unknown
        return self._side


class UserResolver:
    """Resolves the user side of stacks from what is known about files; never waits for them.

    Args:
        known: filled by the store of tables as the files are met.
    """

    def __init__(self, known: KnownFiles) -> None:
        self._known = known
        self._files: dict[FileKey, _KnownFile] = {}
        self._mapped: dict[tuple[int, int, int, int], _Frames] = {}

    @property
    def version(self) -> int:
        """Grows whenever another file becomes known."""
        return self._known.version

    def state(self, sample: RawSample) -> None:
        """A stack names its files itself, so that neither process nor time matters."""

    def resolve(self, raw: RawSide, state: None) -> Side | _PendingSide:
        """The frames of a user stack; provisional while one of its files is not known."""
        version = self.version
        side, unknown = self.make_side(raw)
        return _PendingSide(self, raw, version, side, unknown) if unknown else side

    def make_side(self, raw: RawSide) -> tuple[Side, int]:
        """The side as far as its files are known, and how many are not."""
        _, mappings, words = split_user_stack(raw.words)
        tables = [self._map(fields) for fields in mappings]
        unknown = sum(table.is_unknown for table in tables)
        # Without any, or with too many, a frame without a mapping may have a file all the same.
        is_told = 0 < len(mappings) < NO_MAPPING
        outside = _Frames(None, 0, Unresolved.NO_FILE if is_told else Unresolved.USER_ADDRESS)
        tables += [outside] * (NO_MAPPING + 1 - len(tables))
        frames = [tables[word >> ADDRESS_BITS & NO_MAPPING][word & _FRAME_MASK] for word in words]
        return Side(USER_SIDE, tuple(frames), raw.status, is_provisional=unknown > 0), unknown

    def advance(self, now_boot_ns: int) -> int:
        """Nothing to wait for: files that become known later complete provisional sides."""
        return now_boot_ns

    def close(self) -> None:
        """Forget all frames."""
        self._forget()

    def _map(self, fields: tuple[int, int, int, int]) -> _Frames:
        """The frames of a mapping; kept if its file is known."""
        known = self._mapped.get(fields)
        if known is not None:
            return known
        key, bias = FileKey(*fields[:3]), fields[3]
        details = self._known.get(key)
        if details is None:
            return _Frames(None, 0, Unresolved.FILE_UNKNOWN)
        if len(self._mapped) >= MAX_MAPPINGS_CACHED or self._count() >= MAX_FRAMES_CACHED:
            self._forget()
        file = self._files.get(key)
        if file is None or file.details != details:
            file = self._files[key] = _KnownFile(details)
        frames = self._mapped[fields] = _Frames(file, bias, Unresolved.USER_ADDRESS)
        return frames

    def _count(self) -> int:
        return sum(map(len, self._mapped.values()))

    def _forget(self) -> None:
        self._mapped.clear()
        self._files.clear()


def _make_module(details: FileDetails, text: Segment | None) -> Module:
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
