"""Locates a second thread's variable as the sampler does, and checks the address.

Usage: place.py LIBRARY. The library must export the function `thread_pointer`.
"""

import ctypes
import os
import sys
import threading

from opentelemetry.sdk.trace import TracerProvider

from otel_kprofiler import thread_context
from otel_kprofiler.host import Access
from otel_kprofiler.processes import find_place
from tests.thread_record import LIBRARY


def read_word(address):
    return ctypes.c_uint64.from_address(address % (1 << 64)).value


def check():
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("span"), open("/proc/self/mem", "rb", buffering=0) as memory:
        place = find_place(Access(), os.getpid(), memory.fileno())
        at = get_thread_pointer() + place.offset
        if place.module:
            vector = read_word(get_thread_pointer() + place.vector_at)
            assert read_word(vector + place.length_at) >= place.module
            at = read_word(vector + place.module * place.stride) + place.offset
        variable = ctypes.c_void_p.in_dll(ctypes.CDLL(str(LIBRARY)), "otel_thread_ctx_v1")
        assert at == ctypes.addressof(variable), place
        assert variable.value
        sys.stdout.write(f"{place}\n")


get_thread_pointer = ctypes.CDLL(sys.argv[1]).thread_pointer
get_thread_pointer.restype = ctypes.c_uint64
thread_context.start()
thread = threading.Thread(target=check)
thread.start()
thread.join()
