"""Which context each other thread of the interpreter is in, read from its own structures."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import gc
import operator
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from otel_kprofiler.sdk.thread_slot import (
    THREAD_STATE_WORDS,
    find_context_offset,
    get_thread_state,
)

_CHANGES: Final = frozenset({"attach", "detach"})
_FRAMES: Final = 3
"""``opentelemetry.context.attach`` and that of the runtime context, with one to spare."""


class OtherThread(NamedTuple):
    """A thread, and the context that it was in when it was looked at.

    Attributes:
        ident: as ``threading.get_ident()`` has it.
        tid: as ``threading.get_native_id()`` has it.
        state: address of its ``PyThreadState``.
        context: kept alive by this reference.
    """

    ident: int
    tid: int
    state: int
    context: contextvars.Context


@functools.cache
def _find_layout() -> type[ctypes.Structure] | None:
    """``PyThreadState`` as far as it is needed; None if this is not CPython's way.

    Include/cpython/pystate.h: it begins with the pointers to the states before and behind it and
    to the interpreter. The identifiers stand side by side; where is found out.
    """
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    words = list((ctypes.c_uint64 * THREAD_STATE_WORDS).from_address(get_thread_state()))
    ids = [threading.get_ident(), threading.get_native_id()]
    ids_at = [at for at in range(len(words)) if words[at : at + 2] == ids]
    context_at = find_context_offset()
    if words[2] != api.PyInterpreterState_Get() or len(ids_at) != 1 or context_at is None:
        return None

    class State(ctypes.Structure):
        pass

    pointer = ctypes.POINTER(State)
    fields: dict[int, tuple[str, Any]] = {
        0: ("prev", pointer),
        1: ("next", pointer),
        ids_at[0]: ("ident", ctypes.c_uint64),
        ids_at[0] + 1: ("tid", ctypes.c_uint64),
        context_at // 8: ("context", ctypes.py_object),
    }
    State._fields_ = [
        fields.get(at, (f"word_{at}", ctypes.c_uint64)) for at in range(max(fields) + 1)
    ]
    return State


def read_other_threads() -> list[OtherThread]:
    """The threads of this interpreter that have a context, but for the calling one.

    States come and go whenever the interpreter's lock changes hands. So each is read, from the
    calling thread's own state on, by one call of a getter, which runs no Python code; the
    collector, which would, is off meanwhile. Needs the interpreter's lock.
    """
    layout = _find_layout()
    if layout is None:
        return []
    own = layout.from_address(get_thread_state())
    with _without_collector():
        return [*_read_along(own, "prev"), *_read_along(own, "next")]


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Until 3.11, a collection may begin at any allocation, and runs whatever finalizers do."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _read_along(own: ctypes.Structure, direction: str) -> list[OtherThread]:
    found: list[OtherThread] = []
    path = ""
    while True:
        path += f"{direction}.contents"
        try:
            operator.attrgetter(f"{path}.ident")(own)
        except ValueError:  # a null pointer: the last one
            return found
        parts = (f"{path}.ident", f"{path}.tid", path, f"{path}.context")
        try:
            ident, tid, state, context = operator.attrgetter(*parts)(own)
        except ValueError:
            pass  # it has no context, or has just ended
        else:
            found.append(OtherThread(ident, tid, ctypes.addressof(state), context))
        path += "."


def is_changing_context(ident: int) -> bool:
    """Whether a thread attaches or detaches an OpenTelemetry context at this moment."""
    with _without_collector():  # it would find the list of threads locked (gh-106883)
        frame = sys._current_frames().get(ident)  # noqa: SLF001 - public in all but its name
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name in _CHANGES:
            return True
        frame = frame.f_back
    return False
