"""Locates the thread id in the interpreter's thread states, and corrects stale ids."""

import ctypes
import functools
import os
import threading

from otel_kprofiler.sdk.object_layout import THREAD_STATE_WORDS, get_thread_state


@functools.cache
def find_tid_offset() -> int | None:
    """Returns the thread id's offset in ``PyThreadState``; None if the layout is unexpected.

    The state starts with pointers to the previous state, the next state and the interpreter
    (Include/cpython/pystate.h). ``thread_id`` and ``native_thread_id`` are adjacent.
    """
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    words = list((ctypes.c_uint64 * THREAD_STATE_WORDS).from_address(get_thread_state()))
    ids = [threading.get_ident(), threading.get_native_id()]
    ids_at = [at for at in range(len(words)) if words[at : at + 2] == ids]
    if words[2] != api.PyInterpreterState_Get() or len(ids_at) != 1:
        return None
    return 8 * (ids_at[0] + 1)


def renew_thread_id() -> None:
    """Correct the thread id in this thread's state; the id is stale after a ``fork()`` in C code.

    After ``os.fork()``, ``PyOS_AfterFork_Child`` corrects the id. Readers that find threads by id,
    such as the BPF program, require the correct id.
    """
    tid = threading.get_native_id()
    if tid != os.getpid():  # a forked child's only thread is its main thread
        return
    if find_tid_offset() is None:
        # The search may fail because this thread's id is stale; a new thread's state has the
        # correct id.
        find_tid_offset.cache_clear()
        thread = threading.Thread(target=find_tid_offset, name="kprofiler-layout")
        thread.start()
        thread.join()
    tid_at = find_tid_offset()
    if tid_at is not None:
        ctypes.c_uint64.from_address(get_thread_state() + tid_at).value = tid
