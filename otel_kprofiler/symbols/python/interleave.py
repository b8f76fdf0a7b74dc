"""Replaces the interpreter's native frames with the Python functions that they run.

Each call from C code into the interpreter produces one native frame, that of the evaluation loop.
The native frame is identified by its name, or by its address if the location of the evaluation loop
in the file is known. The native frame is replaced by a chain of Python frames, which ends with the
frame that C code entered. If the number of chains differs from the number of native frames, the
Python frames follow all native frames, at the root end of the stack.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Final

from otel_kprofiler.model import (
    PYTHON_SIDE,
    STACK_OK,
    USER_SIDE,
    Frame,
    KnownLoops,
    Line,
    Side,
)
from otel_kprofiler.speedups import INTERPRETER_LOOP, INTERPRETER_PART, interleave

_EVALUATION: Final = "_PyEval_EvalFrameDefault"
_TAIL_CALL: Final = "_TAIL_CALL_"
"""Name prefix of the per-bytecode functions in tail-calling builds of the interpreter."""
_UNPROVEN: Final = {"frame_pointer", "guess"}
_KINDS: Final = (USER_SIDE, PYTHON_SIDE)
_REST: Final = Side(USER_SIDE, ())[2:]

MAX_FRAMES_MARKED: Final = 16_384


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
        frames = tuple(native.frames)
        marks = self._find_interpreter(frames)
        if self._on_replaced:
            for frame in compress(frames, marks):
                self._on_replaced(_with_name(frame))
        if not any(marks) or not _is_fitting(native, python, marks.count(INTERPRETER_LOOP)):
            return tuple(sides)
        others = [side for side in sides if side.kind not in _KINDS]
        return (*others, *_merge(native, python, marks))

    def _find_interpreter(self, frames: tuple[Frame, ...]) -> bytes:
        """Returns the mark of each frame; 0 if it is outside the interpreter."""
        if self._version != self._loops.version or len(self._marks) > MAX_FRAMES_MARKED:
            self._version = self._loops.version
            self._marks.clear()
        cached_marks = self._marks
        try:
            return bytes(map(cached_marks.__getitem__, frames))
        except KeyError:
            for frame in frames:
                if frame not in cached_marks:
                    self._mark(frame)
            return bytes(map(cached_marks.__getitem__, frames))

    def _mark(self, frame: Frame) -> None:
        mark, module, name = 0, frame.module, frame.function
        if name.partition(".")[0] == _EVALUATION or (
            not frame.lines and module and self._loops.has(module.build_id, frame.address)
        ):
            mark = INTERPRETER_LOOP
        elif name.startswith(_TAIL_CALL):
            mark = INTERPRETER_PART
        self._marks[frame] = mark


def _with_name(frame: Frame) -> Frame:
    if frame.function:
        return frame
    return frame._replace(lines=(Line(_EVALUATION),), unresolved=None)


def _is_fitting(native: Side, python: Side, loops: int) -> bool:
    is_whole, is_python_whole = native.status == STACK_OK, python.status == STACK_OK
    if not (is_whole and is_python_whole) and any(
        frame.found_by in _UNPROVEN for frame in native.frames
    ):
        return False  # an evaluation loop may be missing from the native frames
    closed = len(python.entries)
    has_rest = len(python.frames) > (python.entries[-1] if closed else 0)
    if is_python_whole and (has_rest or loops > closed):
        return False
    return not is_whole or loops >= closed + has_rest


def _merge(native: Side, python: Side, marks: bytes) -> list[Side]:
    """Merges native and Python frames into alternating runs.

    The outermost run of native frames is assigned the status of ``native``, and the outermost run
    of Python frames that of ``python``.
    """
    frames, python_frames = tuple(native.frames), tuple(python.frames)
    sides = interleave(frames, marks, python_frames, python.entries, Side, _KINDS, _REST)
    is_special = native.status or native.is_provisional or python.status or python.is_provisional
    if len(sides) > 1 and not is_special:
        return sides  # both kinds have frames
    for side in (native, python):
        places = [at for at, merged in enumerate(sides) if merged.kind is side.kind]
        if not places:
            sides.append(Side(side.kind, (), side.status, side.is_provisional))
        elif side.status or side.is_provisional:
            last = sides[places[-1]]
            sides[places[-1]] = Side(side.kind, last.frames, side.status, side.is_provisional)
    return sides
