"""Reads the current context of other threads from the interpreter's structures."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import gc
import operator
import os
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
"""Frames to search: ``opentelemetry.context.attach``, the runtime context's, and a spare."""


class OtherThread(NamedTuple):
    """A thread and its context at the time of reading.

    Attributes:
        ident: ``threading.get_ident()`` of the thread.
        tid: ``threading.get_native_id()`` of the thread.
        state: address of its ``PyThreadState``.
        context: its current context.
    """

    ident: int
    tid: int
    state: int
    context: contextvars.Context


@functools.cache
def _find_layout() -> type[ctypes.Structure] | None:
    """Returns the needed part of ``PyThreadState``; None if the layout is not as expected.

    It starts with pointers to the previous state, the next state and the interpreter
    (Include/cpython/pystate.h). The two identifiers are adjacent; their offset is searched for.
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


def find_tid_offset() -> int | None:
    """Returns the thread id's offset in ``PyThreadState``; None if its layout is unexpected."""
    layout: Any = _find_layout()
    return None if layout is None else int(layout.tid.offset)


def renew_thread_id() -> None:
    """Correct the thread id in this thread's state, which is stale after C's ``fork()``.

    ``PyOS_AfterFork_Child`` does the same. Readers that find threads by id, such as the kernel
    program, need it.
    """
    tid = threading.get_native_id()
    if tid != os.getpid():  # a forked child has only the forking thread, as its first
        return
    if find_tid_offset() is None:
        # Perhaps because of the stale id; the states of new threads have correct ids.
        _find_layout.cache_clear()
        thread = threading.Thread(target=_find_layout, name="kprofiler-layout")
        thread.start()
        thread.join()
    layout: Any = _find_layout()
    if layout is not None:
        layout.from_address(get_thread_state()).tid = tid


def read_other_threads() -> list[OtherThread]:
    """Returns this interpreter's other threads that have a context.

    Thread states can vanish whenever the GIL is released. Each is therefore read, starting from the
    calling thread's state, by a single call to a C getter, which runs no Python code; the garbage
    collector, which might, is disabled meanwhile. Needs the GIL.
    """
    layout = _find_layout()
    if layout is None:
        return []
    current = layout.from_address(get_thread_state())
    with _without_collector():
        return [*_read_along(current, "prev"), *_read_along(current, "next")]


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Disable the garbage collector: up to 3.11, any allocation may start it and run finalizers."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _read_along(current: ctypes.Structure, direction: str) -> list[OtherThread]:
    threads: list[OtherThread] = []
    path = ""
    while True:
        path += f"{direction}.contents"
        try:
            operator.attrgetter(f"{path}.ident")(current)
        except ValueError:  # a null pointer: the end of the list
            return threads
        parts = (f"{path}.ident", f"{path}.tid", path, f"{path}.context")
        try:
            ident, tid, state, context = operator.attrgetter(*parts)(current)
        except ValueError:
            pass  # no context, or the thread has just ended
        else:
            threads.append(OtherThread(ident, tid, ctypes.addressof(state), context))
        path += "."


def is_changing_context(ident: int) -> bool:
    """Returns whether a thread is attaching or detaching an OpenTelemetry context."""
    with _without_collector():  # it could deadlock on the thread-state lock (gh-106883)
        frame = sys._current_frames().get(ident)  # noqa: SLF001 - documented, despite its name
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name in _CHANGES:
            return True
        frame = frame.f_back
    return False
