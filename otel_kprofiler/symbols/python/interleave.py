"""Replaces the interpreter's native frames with the Python functions that they run.

Each call from C code into the interpreter produces one native frame, that of the evaluation loop.
The native frame is identified by its name, or by its address if the location of the evaluation loop
in the file is known. The native frame is replaced by a chain of Python frames, which ends with the
frame that C code entered. If the number of chains differs from the number of native frames, the
Python frames follow all native frames, at the root end of the stack.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from otel_kprofiler.model import (
    PYTHON_SIDE,
    STACK_OK,
    USER_SIDE,
    Frame,
    KnownLoops,
    Line,
    Side,
    SideKind,
)

_EVALUATION: Final = "_PyEval_EvalFrameDefault"
_TAIL_CALL: Final = "_TAIL_CALL_"
"""Name prefix of the per-bytecode functions in tail-calling builds of the interpreter."""
_UNPROVEN: Final = {"frame_pointer", "guess"}

MAX_FRAMES_MARKED: Final = 16_384


class _Chains(NamedTuple):
    """Chains of Python frames, one for each call from C code into the interpreter.

    Attributes:
        closed: complete chains, from leaf to root. The outermost frame of each chain is the one
            that C code called.
        rest: frames of the last chain if its outer frames are missing; otherwise empty.
    """

    closed: list[tuple[Frame, ...]]
    rest: tuple[Frame, ...]


class _Mark(enum.IntEnum):
    """The role of a native frame in the interpreter; fits in one byte."""

    OTHER = 0
    LOOP = 1
    PART = 2
    """The frame is in a function whose name has the prefix :data:`_TAIL_CALL`."""


class Interleaver:
    """Interleaves Python and native frames. Not thread-safe.

    Args:
        loops: locations of evaluation loops in files, used to recognize frames without a name.
        on_replaced: called with each native frame that may be replaced. An unnamed frame is
            assigned the evaluation loop's name, so that a replay also replaces this frame.
    """

    def __init__(
        self,
        loops: KnownLoops | None = None,
        on_replaced: Callable[[Frame], None] | None = None,
    ) -> None:
        self._loops = loops or KnownLoops()
        self._on_replaced = on_replaced
        self._marks: dict[Frame, int] = {}  # by the frame's identity
        self._version = self._loops.version

    def __call__(self, sides: Sequence[Side]) -> tuple[Side, ...]:
        """Replaces evaluation-loop frames in a stack, ordered leaf to root, with Python frames."""
        native = python = None
        for side in sides:
            if side.kind is USER_SIDE:
                native = side
            elif side.kind is PYTHON_SIDE:
                python = side
        if native is None or python is None:
            return tuple(sides)
        marks = self._find_interpreter(tuple(native.frames))
        if self._on_replaced:
            for at in marks:
                self._on_replaced(_with_name(native.frames[at]))
        if not marks:
            return tuple(sides)
        chains = _split(python)
        if not _is_fitting(native, python, chains, list(marks.values()).count(_Mark.LOOP)):
            return tuple(sides)
        others = tuple([side for side in sides if side.kind not in (USER_SIDE, PYTHON_SIDE)])
        return others + tuple(_merge(native, python, chains, marks))

    def _find_interpreter(self, frames: tuple[Frame, ...]) -> dict[int, int]:
        """Maps the index of each interpreter frame to the frame's :class:`_Mark`."""
        if self._version != self._loops.version or len(self._marks) > MAX_FRAMES_MARKED:
            self._version = self._loops.version
            self._marks.clear()
        cached_marks = self._marks
        try:
            marks = bytes(map(cached_marks.__getitem__, frames))
        except KeyError:
            for frame in frames:
                if frame not in cached_marks:
                    self._mark(frame)
            marks = bytes(map(cached_marks.__getitem__, frames))
        return {at: mark for at, mark in enumerate(marks) if mark}

    def _mark(self, frame: Frame) -> None:
        mark, module, name = _Mark.OTHER, frame.module, frame.function
        if name.partition(".")[0] == _EVALUATION or (
            not frame.lines and module and self._loops.has(module.build_id, frame.address)
        ):
            mark = _Mark.LOOP
        elif name.startswith(_TAIL_CALL):
            mark = _Mark.PART
        self._marks[frame] = int(mark)


def _with_name(frame: Frame) -> Frame:
    if frame.function:
        return frame
    return frame._replace(lines=(Line(_EVALUATION),), unresolved=None)


def _split(python: Side) -> _Chains:
    closed, start = [], 0
    frames = tuple(python.frames)
    for end in python.entries:
        closed.append(frames[start:end])
        start = end
    return _Chains(closed, frames[start:])


def _is_fitting(native: Side, python: Side, chains: _Chains, loops: int) -> bool:
    is_whole, is_python_whole = native.status == STACK_OK, python.status == STACK_OK
    if not (is_whole and is_python_whole) and any(
        frame.found_by in _UNPROVEN for frame in native.frames
    ):
        return False  # an evaluation loop may be missing from the native frames
    closed = len(chains.closed)
    has_rest = len(chains.rest) > 0
    if is_python_whole and (has_rest or loops > closed):
        return False
    return not is_whole or loops >= closed + has_rest


def _merge(native: Side, python: Side, chains: _Chains, marks: Mapping[int, int]) -> list[Side]:
    """Merges native and Python frames into alternating runs.

    The outermost run of native frames is assigned the status of ``native``, and the outermost run
    of Python frames that of ``python``.
    """
    frames, left = tuple(native.frames), iter([*chains.closed, chains.rest])
    kinds: list[SideKind] = []
    runs: list[tuple[Frame, ...]] = []

    def put(kind: SideKind, run: tuple[Frame, ...]) -> None:
        if not run:
            return
        if kinds and kinds[-1] is kind:
            runs[-1] += run
        else:
            kinds.append(kind)
            runs.append(run)

    start = 0
    for at, mark in marks.items():
        if start < at:
            put(USER_SIDE, frames[start:at])
        start = at + 1
        if mark == _Mark.LOOP:
            chain = next(left, None)
            if chain is None:
                put(USER_SIDE, (frames[at],))
            else:
                put(PYTHON_SIDE, chain)
    put(USER_SIDE, frames[start:])
    for chain in left:
        put(PYTHON_SIDE, chain)
    sides = list(map(_make_side, kinds, runs))
    for side in (native, python):
        if side.kind not in kinds:
            sides.append(Side(side.kind, (), side.status, side.is_provisional))
        elif side.status or side.is_provisional:
            last = max(at for at, kind in enumerate(kinds) if kind is side.kind)
            sides[last] = Side(side.kind, runs[last], side.status, side.is_provisional)
    return sides


def _make_side(kind: SideKind, run: tuple[Frame, ...]) -> Side:
    # tuple.__new__ takes half the time of Side(…), and a stack may have ten runs of frames.
    return tuple.__new__(Side, (kind, run, STACK_OK, False, ()))
