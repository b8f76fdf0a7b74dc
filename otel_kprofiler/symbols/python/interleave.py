"""Puts Python frames in the place of the native frames of the interpreter that runs them.

Each call of C code into the interpreter is one native frame of its evaluation loop, known by its
name, or by its address where the file's interpreter is known. It runs a chain
of Python frames: from the leaf of the chain to the frame that C code entered. Where the chains are
not as many as the native frames, nothing says which belong together: then the Python frames stay
behind the native ones, towards the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

from otel_kprofiler.model import (
    PYTHON_SIDE,
    STACK_OK,
    USER_SIDE,
    Frame,
    KnownLoops,
    Line,
    Side,
    parse_python_word,
    split_python_stack,
)

_EVALUATION: Final = "_PyEval_EvalFrameDefault"
_TAIL_CALL: Final = "_TAIL_CALL_"
"""Prefix of the functions, one for each instruction, that the loop of some builds runs in."""
_SIDE: Final = attrgetter("side")


class _Chains(NamedTuple):
    """Python frames, one chain for each time that C code entered the interpreter.

    Attributes:
        closed: from leaf to root; each ends with the frame that was entered.
        rest: frames of a last chain whose outer frames are missing.
    """

    closed: list[tuple[Frame, ...]]
    rest: tuple[Frame, ...]


def _is_evaluation(frame: Frame, loops: KnownLoops | None) -> bool:
    """Whether a native frame is CPython's evaluation loop, or a part that was split off from it."""
    if frame.function:
        return frame.function.partition(".")[0] == _EVALUATION
    module = frame.module
    return bool(loops and module and loops.has(module.build_id, frame.address))


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
    entered = [_is_evaluation(frame, loops) for frame in native.frames]
    if on_replaced:
        for frame, is_loop in zip(native.frames, entered, strict=True):
            if is_loop and not frame.function:
                on_replaced(replace(frame, lines=(Line(_EVALUATION),), unresolved=None))
            elif is_loop or _is_instruction(frame):
                on_replaced(frame)
    if not _is_fitting(native, python, chains, sum(entered)):
        return tuple(sides)
    others = tuple([side for side in sides if side.kind not in (USER_SIDE, PYTHON_SIDE)])
    merged = _merge(native.frames, entered, chains)
    return others + tuple(_runs(merged, native, python))


def _is_instruction(frame: Frame) -> bool:
    return frame.function.startswith(_TAIL_CALL)


def _split(python: Side, raw: bytes) -> _Chains:
    closed, start = [], 0
    frames = tuple(python.frames)
    for end, word in enumerate(split_python_stack(raw)[2], start=1):
        if parse_python_word(word).is_from_c:
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


def _merge(native: Iterable[Frame], entered: list[bool], chains: _Chains) -> Iterator[Frame]:
    left = iter([*chains.closed, chains.rest])
    for frame, is_loop in zip(native, entered, strict=True):
        if is_loop:
            yield from next(left, (frame,))
        elif not _is_instruction(frame):
            yield frame
    for chain in left:
        yield from chain


def _runs(frames: Iterable[Frame], *sides: Side) -> list[Side]:
    """The sides that frames are on, one after the other; the outermost has the outcome of all."""
    runs = [Side(kind, tuple(run)) for kind, run in groupby(frames, _SIDE)]
    for side in sides:
        found = [at for at, run in enumerate(runs) if run.kind is side.kind]
        last = runs.pop(found[-1]) if found else Side(side.kind, ())
        at = found[-1] if found else len(runs)
        runs.insert(at, side._replace(frames=last.frames))
    return runs
