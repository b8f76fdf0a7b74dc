"""Runs services, which are separate processes that profile themselves."""

import contextlib
import inspect
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter

from otel_kprofiler.otlp import read_profiles
from tests.public import get_public_python


def work(seconds):
    """Uses CPU time, mostly in the kernel."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        os.listdir("/proc/self/task")


def await_running(profiler):
    deadline = time.monotonic() + 60
    while (stats := profiler.stats())["state"] != "running":
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)


WORK = "import os, time\n" + inspect.getsource(work) + inspect.getsource(await_running)
"""Source code of ``work`` and ``await_running``, for use in services."""


def run(code, *, wrapper=(), env=None, timeout=120):
    """Runs a service in a separate process, and asserts that it exits with status 0.

    With ``wrapper``, which may drop privileges, uses a Python that all users can run.
    """
    python = get_public_python().words if wrapper else [sys.executable]
    done = subprocess.run(
        [*wrapper, *python, "-c", WORK + textwrap.dedent(code)],
        env={**os.environ, "OTEL_KPROFILER_SAMPLES_PER_SECOND": "999", **(env or {})},
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def ask(place, timeout_s):
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(timeout_s)
        client.connect(str(place))
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        while client.recv(4096):
            pass


def is_answered(place):
    """Returns whether a server, which might not be listening yet, responds to a request."""
    with contextlib.suppress(OSError):
        ask(place, timeout_s=30)
        return True
    return False


def problems(log):
    return [
        line for line in log.splitlines() if not line.startswith("BPF symbol records were lost")
    ]


def count_by_pid(windows):
    counts = Counter()
    for window in windows:
        for resource, sample in window.samples:
            counts[resource.attributes["process.pid"]] += len(sample.timestamps_unix_ns)
    return counts


class ToFile:
    """A profile file, and the environment variables that make a service write it."""

    def __init__(self, path):
        self.path = path
        self.env = {"OTEL_PROFILES_EXPORTER": "otlp_json_file", "OTEL_KPROFILER_FILE": str(path)}

    def pids(self):
        return count_by_pid(read_profiles(str(self.path)))

    def exists(self):
        return self.path.exists() and self.path.stat().st_size > 0
