"""Rejects interpreters that the profiler does not support."""

import ctypes
import platform

from otel_kprofiler.errors import HostError


def refuse_subinterpreters() -> None:
    """Raise ``HostError`` in a subinterpreter, or in an interpreter without CPython's C API."""
    api = getattr(ctypes, "pythonapi", None)  # PyPy has no pythonapi
    if api is None:
        raise HostError(
            f"the profiler needs CPython: {platform.python_implementation()} lacks its C API",
            hint="run CPython 3.11 or later",
        )
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    api.PyInterpreterState_GetID.argtypes = [ctypes.c_void_p]
    api.PyInterpreterState_GetID.restype = ctypes.c_int64
    if api.PyInterpreterState_GetID(api.PyInterpreterState_Get()):
        raise HostError(
            "the profiler cannot run in a subinterpreter",
            hint="start it in the main interpreter, where it samples all threads of the process",
        )


def make_second_error() -> HostError:
    """Returns the error raised when a profiler is started while another is running."""
    return HostError(
        "another kernel profiler is already running in this process",
        hint="stop it first; opentelemetry-instrument starts one by itself unless "
        "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=kprofiler is set",
    )
