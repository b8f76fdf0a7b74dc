"""Runs services, which are separate processes that profile themselves."""

import os
import socket
import subprocess
import sys
import textwrap

from otel_kprofiler.otlp import read_profiles
from tests.public import get_public_python

WORK = """
import os, time
def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        os.listdir("/proc/self/task")
"""


def run(code, *, wrapper=(), env=None, timeout=120):
    """Runs a service in a separate process; asserts that it exits with status 0.

    With a wrapper, which may drop privileges, the service does not need to read the checkout.
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


def problems(log):
    return [line for line in log.splitlines() if not line.startswith("BPF symbol records lost")]


class ToFile:
    """A file, and the environment with which a service writes its profiles to it."""

    def __init__(self, path):
        self.path = path
        self.env = {"OTEL_PROFILES_EXPORTER": "otlp_json_file", "OTEL_KPROFILER_FILE": str(path)}

    def pids(self):
        results = {}
        for window in read_profiles(str(self.path)):
            for group in window.profiles[0].resources:
                pid = group.resource.attributes["process.pid"]
                count = sum(len(sample.timestamps_unix_ns) for sample in group.samples)
                results[pid] = results.get(pid, 0) + count
        return results

    def exists(self):
        return self.path.exists() and self.path.stat().st_size > 0
