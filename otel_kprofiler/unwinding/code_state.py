"""Computes where the caller's registers are stored before and after each instruction.

Runs in a child process, so it imports only :mod:`x86_code`.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from otel_kprofiler.unwinding.x86_code import Effect


class State(NamedTuple):
    """Locations of the caller's registers before an instruction. The CFA is rsp before the call.

    Attributes:
        sp: CFA minus rsp; None if unknown.
        saved: CFA minus the address of the saved rbp; 0 if rbp is unchanged; -1 if unknown.
        fp: CFA minus rbp; None if unknown.
    """

    sp: int | None
    saved: int
    fp: int | None


ENTRY_SP: Final = 8
ENTRY: Final = State(ENTRY_SP, 0, None)
UNKNOWN: Final = State(None, -1, None)
OUTERMOST: Final = State(None, -2, None)
"""State without a caller: an entry point clears rbp without saving it, as the ABI advises."""
_MAX_SP: Final = 1 << 27


class Inconsistent(Exception):  # noqa: N818 - an outcome
    """Raised if code does not look like a compiled function."""


def step(state: State, effect: int, value: int) -> State:
    """Returns the state after an instruction. Raises :class:`Inconsistent` if rsp is invalid."""
    change = _FORWARD.get(effect)
    return state if change is None or state == OUTERMOST else change(state, value)


def step_back(state: State, effect: int, value: int) -> State:
    """Returns the state before an instruction; :data:`UNKNOWN` if it cannot be derived."""
    if state == OUTERMOST:
        return UNKNOWN
    change = _BACKWARD.get(effect)
    return state if change is None else change(state, value)


def _less(distance: int | None, change: int) -> int | None:
    return None if distance is None else distance - change


def _move_sp(sp: int | None, change: int) -> int | None:
    sp = _less(sp, change)
    if sp is not None and not 0 <= sp < _MAX_SP:
        raise Inconsistent
    return sp


def _shift(state: State, value: int) -> State:
    sp = _move_sp(state.sp, value)
    if sp is not None and state.sp is not None and sp < state.saved <= state.sp:
        return State(sp, -1, state.fp)  # the slot with the saved rbp is now below rsp
    return state._replace(sp=sp)


def _push(state: State, _: int) -> State:
    sp = _move_sp(state.sp, -8)
    return State(sp, state.saved or sp or -1, state.fp)


def _pop(state: State, _: int) -> State:
    return State(_move_sp(state.sp, 8), 0 if state.saved == state.sp else -1, None)


def _set_fp(state: State, value: int) -> State:
    return State(state.sp, state.saved or -1, _less(state.sp, value))


def _leave(state: State, _: int) -> State:
    fp = state.fp
    return UNKNOWN if fp is None else State(fp - 8, 0 if state.saved == fp else -1, None)


def _store(state: State, value: int) -> State:
    place = _less(state.sp, value)
    if state.saved == 0 and place is not None and place > ENTRY_SP:
        return state._replace(saved=place)
    return state


def _load(state: State, value: int) -> State:
    is_caller = state.saved == _less(state.sp, value)
    return State(state.sp, 0 if is_caller else state.saved, None)


def _clear_fp(state: State, _: int) -> State:
    return state._replace(fp=None) if state.saved else OUTERMOST


def _lose_sp(state: State, _: int) -> State:
    return state._replace(sp=None)


def _before_push(state: State, _: int) -> State:
    return State(_less(state.sp, 8), 0 if state.saved == state.sp else state.saved, None)


def _before_pop(state: State, _: int) -> State:
    sp = _less(state.sp, -8)
    return State(sp, state.saved or sp or -1, None)


def _before_from_fp(state: State, value: int) -> State:
    return State(None, state.saved, _less(state.sp, -value)) if state.saved > 0 else UNKNOWN


def _before_leave(state: State, _: int) -> State:
    if state.sp is None or state.saved:
        return UNKNOWN
    return State(None, state.sp + 8, state.sp + 8)


def _before_store(state: State, value: int) -> State:
    is_here = state.saved == _less(state.sp, value)
    return State(state.sp, 0 if is_here else state.saved, state.fp)


def _before_load(state: State, value: int) -> State:
    return State(state.sp, state.saved or _less(state.sp, value) or -1, None)


def _before_change_of_fp(state: State, _: int) -> State:
    return state._replace(fp=None) if state.saved > 0 else UNKNOWN


_Change = Callable[[State, int], State]
_FORWARD: Final[Mapping[int, _Change]] = {
    Effect.SHIFT: _shift,
    Effect.PUSH_FP: _push,
    Effect.POP_FP: _pop,
    Effect.SET_FP: _set_fp,
    Effect.FROM_FP: lambda state, value: state._replace(sp=_less(state.fp, value)),
    Effect.LEAVE: _leave,
    Effect.STORE_FP: _store,
    Effect.LOAD_FP: _load,
    Effect.CLEAR_FP: _clear_fp,
    Effect.LOSE_SP: _lose_sp,
}
_BACKWARD: Final[Mapping[int, _Change]] = {
    Effect.SHIFT: lambda state, value: state._replace(sp=_less(state.sp, -value)),
    Effect.PUSH_FP: _before_push,
    Effect.POP_FP: _before_pop,
    Effect.SET_FP: _before_change_of_fp,
    Effect.FROM_FP: _before_from_fp,
    Effect.LEAVE: _before_leave,
    Effect.STORE_FP: _before_store,
    Effect.LOAD_FP: _before_load,
    Effect.CLEAR_FP: _before_change_of_fp,
    Effect.LOSE_SP: _lose_sp,
}


def merge(left: State, right: State) -> State:
    """Returns a state with only the values that both states share.

    Raises :class:`Inconsistent` if the states contradict each other.
    """
    if left == right:
        return left
    if OUTERMOST in (left, right):
        raise Inconsistent
    sp = left.sp if left.sp == right.sp else None
    if sp is None and None not in (left.sp, right.sp):
        raise Inconsistent
    saved = left.saved if left.saved == right.saved else -1
    if saved < 0 and -1 not in (left.saved, right.saved):
        raise Inconsistent
    return State(sp, saved, left.fp if left.fp == right.fp else None)


def is_known(state: State) -> bool:
    """Returns whether a state suffices to find the caller."""
    return state.saved >= -1 and (state.fp is not None or (state.sp is not None and state.sp >= 8))
