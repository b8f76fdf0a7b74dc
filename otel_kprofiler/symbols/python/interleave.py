"""Puts Python frames in the place of the native frames of the interpreter that runs them.

Each call of C code into the interpreter is one native frame of its evaluation loop, known by its
name, or by its address where the file's interpreter is known. It runs a chain
of Python frames: from the leaf of the chain to the frame that C code entered. Where the chains are
not as many as the native frames, nothing says which belong together: then the Python frames stay
behind the native ones, towards the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
    find_entries,
)

_EVALUATION: Final = "_PyEval_EvalFrameDefault"
_TAIL_CALL: Final = "_TAIL_CALL_"
"""Prefix of the functions, one for each instruction, that the loop of some builds runs in."""
_PREFIXES: Final = (_EVALUATION, _TAIL_CALL)


class _Chains(NamedTuple):
    """Python frames, one chain for each time that C code entered the interpreter.

    Attributes:
        closed: from leaf to root; each ends with the frame that was entered.
        rest: frames of a last chain whose outer frames are missing.
    """

    closed: list[tuple[Frame, ...]]
    rest: tuple[Frame, ...]


class _Marks(NamedTuple):
    """Native frames of the interpreter, as their places in the stack.

    Attributes:
        loops: evaluation loops.
        all: with them, the functions that a loop was split into.
    """

    loops: set[int]
    all: list[int]


def interleave(
    sides: Sequence[Side],
    raw: Sequence[bytes],
    *,
    loops: KnownLoops | None = None,
    on_replaced: Callable[[Frame], None] | None = None,
) -> tuple[Side, ...]:
    """The sides of a stack, with Python frames in the place of evaluation loops.

    Args:
        sides: from leaf to root, each kind once.
        raw: the words of each.
        loops: evaluation loops in files, for frames without a name.
        on_replaced: gets the native frames that may be replaced, all with their names, so that a
            replay knows as many.
    """
    place = {side.kind: number for number, side in enumerate(sides)}
    if USER_SIDE not in place or PYTHON_SIDE not in place:
        return tuple(sides)
    native, python = sides[place[USER_SIDE]], sides[place[PYTHON_SIDE]]
    chains = _split(python, raw[place[PYTHON_SIDE]])
    marks = _find_interpreter(native.frames, loops)
    if on_replaced:
        for at in marks.all:
            frame = native.frames[at]
            if not frame.function:
                frame = replace(frame, lines=(Line(_EVALUATION),), unresolved=None)
            on_replaced(frame)
    if not marks.all or not _is_fitting(native, python, chains, len(marks.loops)):
        return tuple(sides)
    others = tuple([side for side in sides if side.kind not in (USER_SIDE, PYTHON_SIDE)])
    return others + tuple(_merge(native, python, chains, marks))


def _find_interpreter(frames: Iterable[Frame], loops: KnownLoops | None) -> _Marks:
    """Frames of CPython's evaluation loop, of parts split off from it, and of its instructions."""
    marks = _Marks(set(), [])
    for at, frame in enumerate(frames):
        lines = frame.lines
        if lines:
            name = lines[-1].function
            if not name.startswith(_PREFIXES):
                continue
            is_loop = name.partition(".")[0] == _EVALUATION
            if not is_loop and not name.startswith(_TAIL_CALL):
                continue
        else:
            module = frame.module
            if not (loops and module and loops.has(module.build_id, frame.address)):
                continue
            is_loop = True
        marks.all.append(at)
        if is_loop:
            marks.loops.add(at)
    return marks


def _split(python: Side, raw: bytes) -> _Chains:
    closed, start = [], 0
    frames = tuple(python.frames)
    for end in find_entries(raw):
        closed.append(frames[start:end])
        start = end
    return _Chains(closed, frames[start:])


def _is_fitting(native: Side, python: Side, chains: _Chains, loops: int) -> bool:
    """Whether the first loop runs the first chain, and so on."""
    is_whole, is_python_whole = native.status == STACK_OK, python.status == STACK_OK
    if not (is_whole and is_python_whole) and any(frame.found_by for frame in native.frames):
        return False  # a loop may be missing among them
    closed = len(chains.closed)
    has_rest = len(chains.rest) > 0
    if is_python_whole and (has_rest or loops > closed):
        return False
    return not is_whole or loops >= closed + has_rest


def _merge(native: Side, python: Side, chains: _Chains, marks: _Marks) -> list[Side]:
    """Both sides in runs, one after the other; the outermost has the outcome of all."""
    frames, runs = tuple(native.frames), list[Side]()

    def put(kind: SideKind, run: tuple[Frame, ...]) -> None:
        if runs and runs[-1].kind is kind:
            run = (*runs.pop().frames, *run)
        if run:
            runs.append(Side(kind, run))

    left = iter([*chains.closed, chains.rest])
    start = 0
    for at in marks.all:
        put(USER_SIDE, frames[start:at])
        start = at + 1
        if at in marks.loops:
            chain = next(left, None)
            if chain is None:
                put(USER_SIDE, (frames[at],))
            else:
                put(PYTHON_SIDE, chain)
    put(USER_SIDE, frames[start:])
    for chain in left:
        put(PYTHON_SIDE, chain)
    for side in (native, python):
        found = [at for at, run in enumerate(runs) if run.kind is side.kind]
        if found:
            runs[found[-1]] = side._replace(frames=runs[found[-1]].frames)
        else:
            runs.append(side._replace(frames=()))
    return runs
