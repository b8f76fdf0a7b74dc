"""Python versions of types and functions that are also written in C."""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import nlargest
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

FrameT = TypeVar("FrameT", bound=tuple[Any, ...])
StackT = TypeVar("StackT")
SideT = TypeVar("SideT", bound=tuple[Any, ...])

_ADDRESS_BITS: Final = 56
_ADDRESS_MASK: Final = (1 << _ADDRESS_BITS) - 1
_SOURCE_BITS: Final = 60
_BY_TABLE: Final = 1
_MAPPING_MASK: Final = 15
_WORD_BYTES: Final = 8
_WORD_MASK: Final = (1 << 64) - 1
_MAX_LINE: Final = (1 << 31) - 1
INTERPRETER_LOOP: Final = 1
"""Marks a frame of the interpreter's evaluation loop."""
INTERPRETER_PART: Final = 2
"""Marks a frame of a function that runs a part of the evaluation loop."""
_FIRST_ONE_LINE, _LAST_ONE_LINE, _LAST_NUMBER = 10, 12, 14
"""Line table entries of kinds 10 to 12 advance the line number by ``kind - 10``. Entries of kinds
13 and 14 store the number of lines to advance.
"""
_ENTRY: Final = re.compile(rb"([\x80-\xff])([\x40-\x7f]{0,5}[\x00-\x3f])?[\x00-\x7f]*")
"""An entry of a line table: its first byte, and the varint that may follow."""


class FrameCache(Generic[FrameT]):
    """Maps 64-bit words to frames. Not thread-safe."""

    __slots__ = ("_earlier", "_recent")

    def __init__(self) -> None:
        self._recent: dict[int, FrameT] = {}
        self._earlier: dict[int, FrameT] = {}

    def __len__(self) -> int:
        return len(self._recent)

    def __setitem__(self, word: int, frame: FrameT) -> None:
        """Store the frame of a word, which is below 2**64."""
        self._recent[word] = frame

    def get(self, word: int) -> FrameT | None:
        """Returns the frame of a word; None if there is none."""
        frame = self._recent.get(word)
        if frame is None and (frame := self._earlier.get(word)) is not None:
            self._recent[word] = frame
        return frame

    def get_any(self) -> FrameT | None:
        """Returns a frame used since the last call of :meth:`age`; None if there is none."""
        return next(iter(self._recent.values()), None)

    def age(self) -> int:
        """Drop the frames not used since the last call, and return the number of those left."""
        self._earlier, self._recent = self._recent, {}
        return len(self._earlier)

    def find(
        self,
        raw: bytes,
        start: int,
        files: "_Files[FrameT]",
        missing: Callable[[int], FrameT],
    ) -> tuple[FrameT, ...]:
        """Returns the frames of the words that begin at ``raw[start]``.

        The words have the format of :func:`~otel_kprofiler.model.split_user_stack`. ``files`` has
        an item for each of the 16 mapping indices in a word: the cache of the mapping's file, the
        mapping's bias, and a pattern for new frames or None; or None if there is no file. Leaves,
        and callers unwound by an unwind table, are looked up by file offset in the file's cache if
        this cache does not contain their word. If the file has a pattern, and neither cache
        contains the frame, the frame is made. ``missing`` is called with each remaining word; it
        may store the frame that it returns.

        Raises ``ValueError`` if the words are not whole.
        """
        if not 0 <= start <= len(raw) or (len(raw) - start) % _WORD_BYTES:
            raise ValueError("the stack does not consist of whole words")
        words, get = memoryview(raw)[start:].cast("Q"), self._recent.get
        frames = tuple(map(get, words))
        if all(frames):
            return cast(tuple[FrameT, ...], frames)
        # A word's first use may have stored the frame of its next uses.
        return tuple([
            self.get(word) or self._find_in_file(word, files) or missing(word) for word in words
        ])  # fmt: skip

    def _find_in_file(self, word: int, files: "_Files[FrameT]") -> FrameT | None:
        file = files[word >> _ADDRESS_BITS & _MAPPING_MASK]
        adjustment = word >> _SOURCE_BITS  # 0: the leaf, or a signal trampoline
        if adjustment > _BY_TABLE or file is None:
            return None
        cache, bias, pattern = file
        offset = (word & _ADDRESS_MASK) - adjustment - bias & _WORD_MASK
        frame = cache.get(offset)
        if frame is None and pattern is not None:
            frame = cache[offset] = pattern.make(offset)
        if frame is not None:
            self._recent[word] = frame
        return frame


class FramePattern(NamedTuple, Generic[FrameT]):
    """Pattern for the frames of a file whose symbols are not read.

    Attributes:
        frame_type: a named tuple, whose first two fields are the module and the address.
        segments: the file offset, size, address and module of each segment that contains code.
        module: the module of code outside segments, whose address is its file offset.
        rest: the fields after the address.
    """

    frame_type: type[Any]
    segments: tuple[tuple[int, int, int, object], ...]
    module: object
    rest: tuple[object, ...]

    def locate(self, offset: int) -> tuple[object, int]:
        """Returns the module and the address of the code at a file offset."""
        module, address = self.module, offset
        for start, size, segment_address, segment_module in self.segments:
            if 0 <= offset - start < size:
                module, address = segment_module, segment_address + offset - start & _WORD_MASK
        return module, address

    def make(self, offset: int) -> FrameT:
        """Returns the frame of the code at a file offset."""
        frame: FrameT = tuple.__new__(self.frame_type, (*self.locate(offset), *self.rest))
        return frame


_Files = Sequence[tuple[FrameCache[FrameT], int, FramePattern[FrameT] | None] | None]


_FunctionKey = tuple[str, str, str, int]
"""A function, its system name, its file and its first line."""
_Sides = tuple[tuple[Any, ...], ...]
"""The sides of a stack: the frames of a side are its second field, its status is the third."""


def find_kind(frame: tuple[Any, ...]) -> tuple[object, ...]:
    """Returns a key that is equal for frames that differ only in addresses, lines and offsets."""
    module, _, _, _, *kind = frame
    return id(module), *kind


class FrameTokens(Generic[FrameT]):
    """Counts the uses of frames, and maps frames to tokens. Frames are compared by identity."""

    __slots__ = ("_counts", "_tokens")

    def __init__(self) -> None:
        self._counts: Counter[FrameT] = Counter()
        self._tokens: dict[FrameT, bytes] = {}

    def count(self, sides: _Sides) -> bool:
        """Count one more use of each frame of a stack.

        Returns False if there are sides whose frames are not tuples; these are left to the caller.
        """
        counted = [side[1] for side in sides if isinstance(side[1], tuple)]
        for frames in counted:
            self._counts.update(frames)
        return len(counted) == len(sides)

    def most_used(self, limit: int) -> list[tuple[FrameT, int]]:
        """Returns the most used frames and their uses, which decrease.

        Frames with equal uses are in the order in which they were added.
        """
        uses = [(frame, count) for frame, count in self._counts.items() if count]
        return nlargest(limit, uses, key=itemgetter(1))

    def group(self, groups: dict[tuple[object, ...], list[FrameT]]) -> None:
        """Add each counted frame, in the order in which they were added, to the list of its kind.

        :func:`find_kind` describes kinds.
        """
        for frame, count in self._counts.items():
            if count:
                groups.setdefault(find_kind(frame), []).append(frame)

    def get(self, frame: FrameT) -> bytes | None:
        """Returns the token of a frame; None if it has none."""
        return self._tokens.get(frame)

    def __setitem__(self, frame: FrameT, token: bytes) -> None:
        """Store a frame's token of 1 to 11 bytes."""
        self._counts.setdefault(frame, 0)
        self._tokens[frame] = token

    def join(
        self, sides: _Sides, separator: bytes, missing: Callable[[FrameT], bytes]
    ) -> bytes | None:
        """Returns the tokens of a stack's frames, separated.

        Leaves stacks with a side that has a status, or whose frames are not a tuple, by returning
        None. ``missing`` stores and returns a new token.
        """
        for _, frames, *more in sides:
            if not isinstance(frames, tuple) or (more and more[0]):
                return None
        tokens, frames = self._tokens, chain.from_iterable([side[1] for side in sides])
        return separator.join([tokens.get(frame) or missing(frame) for frame in frames])

    def add_locations(  # noqa: PLR0917 - the C function has only positional parameters
        self,
        frames: list[FrameT],
        at: int,
        start: int,
        end: int,
        mapping: bytes,
        attributes: bytes,
        functions: dict[_FunctionKey, bytes],
        entries: list[bytes],
        tokens: dict[bytes, bytes],
        /,
    ) -> tuple[int, int]:
        """Add locations as protobuf, and store their tokens.

        Returns the index of the first frame that is left to the caller, and the size of the new
        entries. Leaves frames outside of ``start`` to ``end``, frames with functions that have no
        token, and entries of more than 129 bytes. The Python version leaves all frames.

        Args:
            frames: frames of the same kind.
            at: index of the first frame to add.
            mapping: token of the mapping; empty if there is none.
            attributes: the encoded attributes.
            functions: tokens of functions.
            entries: ``location_table``, except its zero entry.
            tokens: tokens by entry.
        """
        return at, 0

    def add_samples(  # noqa: PLR0917 - the C function has only positional parameters
        self,
        samples: Sequence[tuple[Any, ...]],
        at: int,
        stacks: dict[StackT, bytes],
        statuses: dict[StackT, Any],
        shortcuts: dict[tuple[object, ...], bytes],
        entries: list[bytes],
        tokens: dict[bytes, bytes],
        times: dict[bytes, bytes],
        sizes: list[int],
        size: int,
        tables_size: int,
        limit: int,
        /,
    ) -> tuple[int, int, int, int]:
        """Add samples as protobuf, and the stacks of these samples.

        Returns the index of the first sample that is left to the caller, the new ``size``, the size
        of the new entries, and the number of timestamps that were added. Leaves samples with links,
        statuses, new attributes, or frames without tokens, and others after 64 samples or if the
        limit is exceeded. The Python version leaves all samples.

        Args:
            samples: a list of samples without values.
            at: index of the first sample to add.
            stacks: tokens by stack.
            statuses: contains the stacks with statuses.
            shortcuts: the encoded attributes of samples.
            entries: ``stack_table``, except its zero entry.
            tokens: tokens by entry.
            times: packed timestamps by the sample's other fields.
            sizes: receives the size of samples and tables after each sample.
            size: size of the samples so far.
            tables_size: size of the tables so far.
            limit: maximum size of samples and tables.
        """
        return at, size, 0, 0


def find_btf_types(types: bytes, fixed: bytes, each: bytes) -> bytes:
    """Returns the offset of each type in BTF's type section, as 32-bit numbers.

    The items of ``fixed`` and ``each`` are the sizes of the 32 kinds of types, in words of 4 bytes:
    the size of a type without members, which is not 0, and of each member.
    """
    words = memoryview(types[: len(types) & ~3]).cast("I")
    places = array("I")
    add, at, end = places.append, 0, len(words) - 2
    while at < end:
        add(at * 4)
        info = words[at + 1]
        kind = info >> 24 & 31
        at += fixed[kind] + each[kind] * (info & 0xFFFF)
    return places.tobytes()


def interleave(  # noqa: PLR0917 - the C function has only positional parameters
    native: tuple[FrameT, ...],
    marks: bytes,
    python: tuple[FrameT, ...],
    entries: tuple[int, ...],
    side_type: type[SideT],
    kinds: tuple[object, object],
    rest: tuple[object, ...],
    /,
) -> list[SideT]:
    """Replaces the interpreter's native frames with Python frames, and returns alternating sides.

    Each native frame marked :data:`INTERPRETER_LOOP` is replaced by the next chain of Python
    frames, and stays if no chain is left. Native frames marked :data:`INTERPRETER_PART` are
    removed. Chains without a frame to replace follow all native frames.

    Args:
        native: native frames, leaf first.
        marks: the mark of each native frame; 0 for frames outside the interpreter.
        python: Python frames, leaf first.
        entries: the end of each chain in ``python``, ascending. The last chain follows.
        side_type: a named tuple of a side's kind, its frames and other fields.
        kinds: the kinds of native and Python sides.
        rest: the fields of each side after the frames.

    Raises ``TypeError`` or ``ValueError`` if ``marks`` or ``entries`` do not fit the frames.
    """
    if len(marks) != len(native):
        raise TypeError(f"native must have {len(marks)} fields")
    starts, ends = (0, *entries), (*entries, len(python))
    if any(start > end for start, end in zip(starts, ends, strict=True)):
        raise ValueError("the entries are not indices in order")
    parts = map(slice, starts, ends)
    user_kind, python_kind = kinds
    pieces: list[tuple[object, tuple[FrameT, ...]]] = []
    kept = 0
    for at, mark in enumerate(marks):
        part = next(parts, None) if mark == INTERPRETER_LOOP else slice(0)
        if mark and part is not None:
            pieces += [(user_kind, native[kept:at]), (python_kind, python[part])]
            kept = at + 1
    pieces += [(user_kind, native[kept:]), *((python_kind, python[part]) for part in parts)]
    runs = groupby([piece for piece in pieces if piece[1]], itemgetter(0))
    return [
        tuple.__new__(side_type, (kind, tuple(chain.from_iterable(run for _, run in group)), *rest))
        for kind, group in runs
    ]


def find_line(table: bytes, first_line: int, instruction: int) -> int:
    """Returns the 1-based source line of an instruction; 0 if it has none.

    Decodes ``co_linetable`` up to the first malformed entry. CPython 3.11 and later use this
    format, which is described in CPython's ``Objects/locations.md`` (3.11, 3.12) and
    ``InternalDocs/code_objects.md`` (3.13 and later).

    Args:
        first_line: ``co_firstlineno``, a signed 32-bit number.
        instruction: index of the code unit.
    """
    if not -_MAX_LINE - 1 <= first_line <= _MAX_LINE or instruction < 0:
        return 0
    line, at = first_line, 0
    while entry := _ENTRY.match(table, at):
        head, number = entry[1][0], entry[2]
        kind, at = head >> 3 & 15, entry.end()
        if _FIRST_ONE_LINE <= kind <= _LAST_ONE_LINE:
            line += kind - _FIRST_ONE_LINE
        elif _LAST_ONE_LINE < kind <= _LAST_NUMBER:
            if number is None:
                return 0
            line += _read_number(number)
        instruction -= (head & 7) + 1
        if instruction < 0:
            return line if kind <= _LAST_NUMBER and 0 < line <= _MAX_LINE else 0
    return 0


def _read_number(number: bytes) -> int:
    """Decodes a signed varint: six bits per byte, lowest first; bit 0 is the sign."""
    value = 0
    for place, byte in enumerate(number):
        value |= (byte & 63) << 6 * place
    return -(value >> 1) if value & 1 else value >> 1
