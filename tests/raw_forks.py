"""Runs functions in forked children, with Python's fork hooks or (as in C servers) without."""

import ctypes
import inspect
import os
import select
import signal
import sys
import threading
import time
import warnings


def raw_fork():
    """Forks a child in which threads can run. Returns the child's id in the parent, 0 in the child.

    In the child, the GIL's condition variable in glibc still counts a thread that was waiting when
    the process forked, so the child's threads may wait for that thread forever. A child that hangs
    is killed, and the fork is repeated.
    """
    for _ in range(5):
        reading, writing = os.pipe()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        pid = ctypes.PyDLL(None).fork()
        sys.setswitchinterval(interval)
        if not pid:
            other = threading.Thread(target=spin)
            other.start()
            spin()
            other.join()
            os.write(writing, b".")
        else:
            can_run = select.select([reading], [], [], 10)[0]
        os.close(reading)
        os.close(writing)
        if not pid or can_run:
            return pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    raise TimeoutError("none of five forked children can run threads")


def spin():
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        time.sleep(0)


MODULES = "import ctypes, os, select, signal, sys, threading, time\n"
CODE = MODULES + inspect.getsource(raw_fork) + inspect.getsource(spin)
"""The source of ``raw_fork`` and ``spin``, for services in separate processes."""


def python_fork():
    """Calls ``os.fork`` without its warning about multi-threaded processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def run_in_child(fork, work):
    """Runs a function in a forked child. Returns the result as text, and the child's exit code."""
    reading, writing = os.pipe()
    pid = fork()
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


def check_in_child(check, fork=os.fork):
    """Runs a function in a forked child, where it must not raise an exception."""
    _, status = run_in_child(fork, check)
    assert status == 0
