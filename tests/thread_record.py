"""Reads the calling thread's context as the specification describes."""

import ctypes
import importlib.util
import platform
from pathlib import Path

FOLDER = Path(importlib.util.find_spec("otel_kprofiler.thread_record").origin).parent
LIBRARY = FOLDER / f"_record_{platform.machine()}.abi3.so"


def read_record():
    """Returns trace id, span id, flags and attributes by number, or None outside of spans."""
    library = ctypes.CDLL(str(LIBRARY))
    address = ctypes.c_void_p.in_dll(library, "otel_thread_ctx_v1").value  # this thread's variable
    if not address:
        return None
    header = ctypes.string_at(address, 28)
    if header[24] != 1:
        return None
    data = ctypes.string_at(address + 28, int.from_bytes(header[26:28], "little"))
    attributes = {}
    while len(data) >= 2 and len(data) >= 2 + data[1]:
        attributes[data[0]] = data[2 : 2 + data[1]].decode()
        data = data[2 + data[1] :]
    trace_id, span_id = (int.from_bytes(part, "big") for part in (header[:16], header[16:24]))
    return trace_id, span_id, header[25], attributes
