"""Python frames in other processes, sampled by a user with only CAP_BPF and CAP_PERFMON."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.interpreters import Python, find_pythons
from tests.needs import CLANG, LIBBPF
from tests.public import NOBODY, TWO, as_nobody, open_directory, publish_interpreter
from tests.truth.python.chains import STYLES
from tests.truth.python.measure import PROGRAM, SEED, building, running

OWN_NAMESPACES = ("unshare", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child")
SAMPLES = int(os.environ.get("KPROFILER_PYTHON_SAMPLES", "1000"))
MAX_MISSING = 0.02 if SAMPLES >= 20_000 else 0.04  # small numbers of samples vary more

pytestmark = [
    pytest.mark.live,
    LIBBPF,
    CLANG,
    pytest.mark.skipif(
        os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv"
    ),
]


@pytest.fixture
def folder():
    with open_directory() as folder:
        yield folder


@pytest.fixture
def built(folder):
    with building() as path:
        yield Path(shutil.copy(path, folder))


def publish(python, folder):
    return Python(publish_interpreter(python.command, folder / python.version), python.version)


TRACK = """
import sys, time
sys.path[:0] = [sys.argv[1]]
from otel_kprofiler.interpreters import PythonTracking
from tests.interpreters import Journal
journal = Journal()
tracking = PythonTracking(journal)
tracking.start()
for _ in range(2):  # once the second report is taken, all files are open
    journal.see(1)
    while journal.seen:
        time.sleep(0.01)
print(flush=True)
pid = int(sys.stdin.readline())
end = time.monotonic() + 60
while pid not in journal.now and time.monotonic() < end:
    time.sleep(0.05)
print(journal.now[pid][1].runtime_at, flush=True)
tracking.close()
"""
SERVICE = """
import ctypes, sys
print(ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime")), flush=True)
sys.stdin.read()
"""


def test_other_users_new_processes_are_registered(folder, public_python):
    """With CAP_PERFMON, an executable is found by path and must have the recorded build id.

    The processes' mappings cannot be read, so the kernel's mmap records are used instead.
    """
    python = publish(find_pythons()[0], folder)
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    tracking = [*as_nobody(*TWO), public_python.command, "-c", TRACK, public_python.root]
    with subprocess.Popen(tracking, cwd="/", **options) as tracker:
        tracker.stdout.readline()
        with subprocess.Popen([python.command, "-c", SERVICE], **options) as service:
            address = service.stdout.readline()
            tracker.stdin.write(f"{service.pid}\n")
            tracker.stdin.flush()
            assert tracker.stdout.readline() == address
            service.stdin.close()


@pytest.mark.long
def test_two_versions_of_python_are_sampled_across_namespaces(built, folder, public_python):
    """CAP_BPF and CAP_PERFMON suffice to sample the same user's running processes."""
    result = find_pythons()
    first, second = [publish(one, folder) for one in (result[0], result[-1])]
    program = Path(shutil.copy(PROGRAM, folder))
    shutil.copy(PROGRAM.with_name("chains.py"), folder)
    with (
        running(first, *NOBODY, program=program, cwd="/") as here,
        running(second, *OWN_NAMESPACES, *NOBODY, program=program, cwd="/") as elsewhere,
    ):
        lines = [
            json.dumps([process.pid, process.threads, SEED, STYLES, process.judge.below])
            for process in (here, elsewhere)
        ]
        sampler = [public_python.command, "-m", "tests.truth.python.nobody", built, str(SAMPLES)]
        done = subprocess.run(
            [*as_nobody(*TWO), *sampler], input="\n".join(lines), cwd=public_python.root,
            text=True, capture_output=True, timeout=280,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        total, wrong, missing, description = json.loads(line)
        assert total >= SAMPLES, description
        assert not wrong, description
        assert missing <= MAX_MISSING * total, description
        print(description)  # noqa: T201 - with -rP
    assert len(done.stdout.splitlines()) == 2
