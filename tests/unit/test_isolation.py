"""Unit tests without the ``system`` marker cannot access the system outside their process."""

import contextlib
import os
import socket
import subprocess
import threading

import pytest

from otel_kprofiler.bpf import call

USES = {
    "process": lambda: subprocess.run(["true"]),
    "shell": lambda: os.system("true"),
    "fork": os.fork,
    "socket": socket.socket,
    "bpf": lambda: call._libc.syscall(321, 0, 0, 0),
}


@pytest.mark.parametrize("use", USES)
def test_system_access_in_a_unit_test_is_blocked_and_recorded(use, guard):
    with pytest.raises(Exception, match="mark the test"):
        USES[use]()
    assert len(guard.uses) == 1
    guard.uses.clear()  # otherwise, the guard would fail this test


def test_forbidden_access_from_a_thread_is_recorded_even_if_the_exception_is_caught(guard):
    def connect():
        with contextlib.suppress(Exception):
            socket.socket()

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    assert len(guard.uses) == 1
    guard.uses.clear()


@pytest.mark.system
def test_a_test_with_the_system_marker_may_run_other_programs():
    subprocess.run(["true"], check=True)
