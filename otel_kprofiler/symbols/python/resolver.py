"""Resolves Python stacks to functions and lines, from descriptions of code objects."""

from __future__ import annotations

import sys
from typing import Final

from otel_kprofiler.model import (
    NO_CODE,
    PYTHON_SIDE,
    Frame,
    KnownCodes,
    Line,
    RawSample,
    RawSide,
    Side,
    Unresolved,
    find_entries,
    parse_python_word,
    split_python_stack,
)
from otel_kprofiler.speedups import find_line
from otel_kprofiler.symbols.cache import BoundedCache
from otel_kprofiler.symbols.resolver import Stateless

MAX_PLACES_CACHED: Final = 16_384
"""Maximum number of instructions with a cached frame. Many instructions map to the same frame."""
MAX_PLACE_BYTES_CACHED: Final = 8 * 1024 * 1024
"""Memory limit for cached frames; a string shared by frames is counted for each frame."""
_PLACE_BYTES: Final = 300
"""Memory used by a frame, excluding its strings."""

UNKNOWN: Final = Frame(None, 0, (), 0, PYTHON_SIDE, Unresolved.CODE_UNKNOWN)


class PythonResolver(Stateless):
    """Resolves the Python frames in stacks from the ids of their code objects.

    Never waits for the description of a code object. The sampler adds the descriptions to
    ``codes``.
    """

    def __init__(self, codes: KnownCodes) -> None:
        self._codes = codes
        self._frames: BoundedCache[int, Frame] = BoundedCache(
            MAX_PLACES_CACHED, self._find, weigh=self._weigh, max_weight=MAX_PLACE_BYTES_CACHED
        )
        self._shared: BoundedCache[Line, Frame] = BoundedCache(
            MAX_PLACES_CACHED // 2,
            _make_frame,
            weigh=lambda line: _text_bytes(line.function, line.file),
            max_weight=MAX_PLACE_BYTES_CACHED // 2,
        )

    @property
    def version(self) -> int:
        """Returns a number that increases whenever a code object is described."""
        return self._codes.version

    def resolve(self, raw: RawSide, state: None) -> Side | _PendingSide:
        """Resolves a Python stack; provisional until all its code objects are described."""
        version = self.version
        side = self.make_side(raw)
        return _PendingSide(self, raw, version, side) if side.is_provisional else side

    def make_side(self, raw: RawSide) -> Side:
        """Resolves the frames with the code objects described so far."""
        words = split_python_stack(raw.words)[2]
        try:
            frames = tuple(map(self._frames.__getitem__, words))
            return Side(PYTHON_SIDE, frames, raw.status, entries=find_entries(words))
        except _NotDescribedError:
            frames = tuple(map(self._frame, words))
        is_pending = any(
            frame is UNKNOWN and parse_python_word(word).code != NO_CODE
            for frame, word in zip(frames, words, strict=True)
        )
        return Side(PYTHON_SIDE, frames, raw.status, is_pending, find_entries(words))

    def close(self) -> None:
        """Forget all frames."""
        self._frames.clear()
        self._shared.clear()

    def _frame(self, word: int) -> Frame:
        try:
            return self._frames[word]
        except _NotDescribedError:
            return UNKNOWN

    def _find(self, word: int) -> Frame:
        frame = parse_python_word(word)
        code = self._codes.get(frame.code)
        if code is None:
            raise _NotDescribedError
        number = find_line(code.line_table, code.first_line, frame.instruction)
        return self._shared[Line(code.function, "", code.file, number, code.first_line)]

    def _weigh(self, word: int) -> int:
        code = self._codes.get(parse_python_word(word).code)
        return _text_bytes(code.function, code.file) if code else _PLACE_BYTES


class _NotDescribedError(LookupError):
    """Raised if a code object has no description yet, so that its frames are not cached."""


class _PendingSide:
    """The Python frames in a stack. Frames are named when their code objects are described."""

    __slots__ = ("_raw", "_resolver", "_side", "_version")

    def __init__(self, resolver: PythonResolver, raw: RawSide, version: int, side: Side) -> None:
        self._resolver, self._raw, self._version, self._side = resolver, raw, version, side

    def of(self, sample: RawSample) -> Side:
        """Returns the frames with their latest names, as the same object until a name is added."""
        version = self._resolver.version
        if self._side.is_provisional and version != self._version:
            self._version = version
            side = self._resolver.make_side(self._raw)
            if _count_unknown(side) < _count_unknown(self._side):
                self._side = side
        return self._side


def _text_bytes(function: str, file: str) -> int:
    return _PLACE_BYTES + sys.getsizeof(function) + sys.getsizeof(file)


def _make_frame(line: Line) -> Frame:
    return Frame(None, 0, (line,), 0, PYTHON_SIDE)


def _count_unknown(side: Side) -> int:
    return sum(frame is UNKNOWN for frame in side.frames)
