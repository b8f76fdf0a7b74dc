"""CPython processes of this machine are found, with the addresses that they say themselves."""

import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from otel_kprofiler.interpreters import PythonTracking
from tests.interpreters import VERSIONS, Journal, environment, find_missing, find_pythons

pytestmark = pytest.mark.live

# Writes its pid and the address of its _PyRuntime; then does what each line says.
PROGRAM = """
import ctypes, os, sys
def tell():
    at = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    os.write(1, b"%d %d\\n" % (os.getpid(), at))
tell()
for line in iter(sys.stdin.readline, ""):
    if line == "fork\\n":
        if not os.fork():
            tell()
            while True:
                sys.stdin.readline() or os._exit(0)
    else:
        os.execv(line.strip(), [line.strip(), *sys.orig_argv[-2:]])
"""


class Target:
    """A Python process that does what it is told."""

    def __init__(self, command):
        self._process = subprocess.Popen(
            [command, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment(),
        )  # fmt: skip
        self.pid = self._process.pid

    def heard(self):
        pid, at = self._process.stdout.readline().split()
        return int(pid), int(at)

    def tell(self, line):
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def end(self):
        """End it; its child sees the end of its input and ends, too."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def start():
    """Starts targets; ended afterwards."""
    targets = []

    def start_target(command=sys.executable):
        targets.append(Target(command))
        return targets[-1]

    yield start_target
    for target in targets:
        target.end()


def wait_until(holds, seconds=20):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def journal():
    return Journal()


@contextmanager
def tracked(*arguments, **options):
    tracking = PythonTracking(*arguments, **options)
    tracking.start()
    try:
        yield
    finally:
        tracking.close()


@pytest.fixture
def tracking(journal):
    with tracked(journal):
        yield


def is_registered(journal, pid, runtime):
    return pid in journal.now and journal.now[pid][1].runtime_at == runtime


@pytest.mark.parametrize("minor", VERSIONS)
def test_finds_processes_as_they_start_fork_and_end(start, journal, tracking, minor):
    if minor in find_missing():
        pytest.skip(f"no CPython {minor} here")
    for python in find_pythons():
        if python.minor == minor:
            target = start(python.command)
            pid, runtime = target.heard()
            wait_until(lambda: is_registered(journal, pid, runtime))  # noqa: B023
            target.tell("fork")
            child, runtime = target.heard()
            wait_until(lambda: is_registered(journal, child, runtime))  # noqa: B023
            target.end()
            wait_until(lambda: not {pid, child} & journal.now.keys())  # noqa: B023


def test_finds_processes_that_run_already(start, journal):
    target = start()
    pid, runtime = target.heard()
    with tracked(journal):
        wait_until(lambda: is_registered(journal, pid, runtime))


def test_finds_what_a_process_executes(start, journal, tracking):
    pythons = find_pythons()
    target = start(pythons[0].command)
    for python in (*pythons[1:], pythons[0]):
        target.heard()
        target.tell(python.command)
    pid, runtime = target.heard()
    wait_until(lambda: is_registered(journal, pid, runtime))
    target.tell("/bin/true")
    wait_until(lambda: pid not in journal.now)


def test_only_the_processes_asked_for(start, journal):
    """With their children: those that there are already, and those that come."""
    one, other = start(), start()
    other.heard()
    one.heard()
    one.tell("fork")
    before, _ = one.heard()
    with tracked(journal, [one.pid], children=True):
        wait_until(lambda: {one.pid, before} <= journal.now.keys())
        one.tell("fork")
        after, runtime = one.heard()
        wait_until(lambda: is_registered(journal, after, runtime))
        assert {tgid for tgid, *_ in journal.all} == {one.pid, before, after}


def test_ends_without_ever_having_started():
    PythonTracking(Journal()).close()
