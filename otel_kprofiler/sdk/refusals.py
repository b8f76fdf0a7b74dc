"""Interpreters in which there can be no profiler, and why."""

from __future__ import annotations

import ctypes
import sys

from otel_kprofiler.errors import HostError


def refuse_subinterpreters() -> None:
    """Raise in a subinterpreter.

    Raises:
        HostError: this is one.
    """
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    api.PyInterpreterState_GetID.argtypes = [ctypes.c_void_p]
    api.PyInterpreterState_GetID.restype = ctypes.c_int64
    if api.PyInterpreterState_GetID(api.PyInterpreterState_Get()):
        raise HostError(
            "a subinterpreter cannot be profiled by itself",
            hint="start the profiler in the main interpreter: it samples all threads of the "
            "process",
        )


def refuse_green_threads() -> None:
    """Raise where threads are greenlets: a profiler among them would hold up the service.

    Raises:
        HostError: gevent or eventlet has replaced ``threading`` or ``select``.
    """
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent and any(map(gevent.is_module_patched, ("threading", "select"))):
        who = "gevent"
    elif eventlet and any(map(eventlet.is_monkey_patched, ("thread", "select"))):
        who = "eventlet"
    else:
        return
    raise HostError(
        f"{who} has replaced the threads of this process, and the profiler needs a real one",
        hint="run the agent on this host (otel-kprofiler run): it profiles the process under the "
        "Resource that it publishes; or use workers with threads (gunicorn --worker-class gthread)",
    )
