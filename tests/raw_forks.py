"""C's ``fork()``, as servers in C call it: no fork hook of Python runs in the child."""

import ctypes
import inspect
import os
import sys
import time


def raw_fork():
    """Fork while no thread asks for the GIL: the child would wait forever for it to take it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    time.sleep(0.5)  # those that wait already ask after the interval before, or later if busy
    pid = ctypes.PyDLL(None).fork()
    sys.setswitchinterval(interval)
    return pid


CODE = f"import ctypes, os, sys, time\n{inspect.getsource(raw_fork)}"
"""The function, for services in processes of their own."""


def run_in_raw_child(work):
    """Runs a function in such a child; returns its result as text, and the exit code."""
    reading, writing = os.pipe()
    pid = raw_fork()
    if not pid:
        status = 1
        try:
            os.write(writing, str(work()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading) as file:
        text = file.read()
    return text, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
