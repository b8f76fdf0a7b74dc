"""Waits of known programs: `record --off-cpu` tells what each waits for."""

import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from otel_kprofiler.bpf import LibbpfLoader
from otel_kprofiler.model import OFF_CPU, WaitState
from otel_kprofiler.otlp import check_file, read_profiles

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not LibbpfLoader.is_installed(), reason="libbpf1 is not installed"),
]

# Each waits many times in one way only, under a name of its own.
FRAME = """
import fcntl, mmap, os, select, signal, socket, sys, threading, time
path, times = sys.argv[1], 400
reader, writer = os.pipe()
ours, theirs = socket.socketpair()
server = socket.create_server(("127.0.0.1", 0))
def forked(work):
    child = os.fork()
    if not child:
        named("helper")
        work()
        os._exit(0)
    return child
def named(name="waiter"):
    with open("/proc/self/comm", "w") as file:
        file.write(name)
def slowly(action):
    for _ in range(times):
        time.sleep(0.002)
        action()
{body}
os._exit(0)
"""
PROGRAMS = {
    "sleep": "named()\nfor _ in range(times): time.sleep(0.002)",
    "pipe": """
forked(lambda: slowly(lambda: os.write(writer, b"x")))
named()
for _ in range(times): os.read(reader, 1)""",
    "socket_receive": """
forked(lambda: slowly(lambda: theirs.send(b"x")))
named()
for _ in range(times): ours.recv(1)""",
    "socket_accept": """
kept = []
forked(lambda: slowly(lambda: kept.append(socket.create_connection(server.getsockname()))))
named()
for _ in range(times): server.accept()""",
    "poll": "named()\nfor _ in range(times): select.select([reader], [], [], 0.002)",
    "epoll": "polled = select.epoll()\nnamed()\nfor _ in range(times): polled.poll(0.002)",
    "futex": """
lock = threading.Lock()
lock.acquire()
named()
for _ in range(times): lock.acquire(timeout=0.002)""",
    "file_lock": """
def hold():
    held = open(path)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.write(writer, b"x")
    time.sleep(600)
def count(*_):  # system calls go on after signals, unless these raise exceptions
    global times
    times -= 1
    if not times:
        os.kill(holder, signal.SIGKILL)
holder = forked(hold)
os.read(reader, 1)
file = open(path)
signal.signal(signal.SIGALRM, count)
named()
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
fcntl.flock(file, fcntl.LOCK_EX)""",
    "child": """
for _ in range(times // 4):
    forked(lambda: time.sleep(0.01))
    if not _: named()
    os.wait()""",
    "disk": """
file = os.open(path, os.O_RDONLY | os.O_DIRECT)
room = mmap.mmap(-1, 1 << 20)
named()
for at in range(times): os.preadv(file, [room], (at % 32) << 20)""",
    "page_fault": """
file = os.open(path, os.O_RDONLY)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
pages = mmap.mmap(file, 0, prot=mmap.PROT_READ)
pages.madvise(mmap.MADV_RANDOM)
named()
for at in range(8000): pages[(at * 7919 % 8192) * 4096]""",
}
OF_FILES = {"disk", "page_fault"}


@pytest.fixture
def file(tmp_path):
    """A file of 32 MB that is on a disk, and not only in memory."""
    path = tmp_path / "file"
    with open(path, "wb") as made:
        made.write(os.urandom(32 << 20))
        os.fsync(made.fileno())
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("files for tests are kept in memory here")
    return path


@pytest.mark.parametrize("cause", PROGRAMS)
def test_a_program_that_waits_in_one_way_has_that_cause(cause, file, tmp_path):
    written = tmp_path / "waits.otlp"
    program = FRAME.format(body=PROGRAMS[cause])
    record = [
        sys.executable, "-m", "otel_kprofiler", "record", "--off-cpu", "--no-on-cpu",
        "--off-cpu-rate", "10000", "-o", written, "--", sys.executable, "-c", program, file,
    ]  # fmt: skip
    done = subprocess.run(record, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert check_file(str(written)) == []
    found, weights = Counter(), Counter()
    for window in read_profiles(str(written)):
        assert {profile.kind for profile in window.profiles} == {OFF_CPU}
        for _, sample in window.samples:
            if sample.thread_name == "waiter" and sample.wait.state != WaitState.RUNNABLE:
                found[sample.wait.cause.label] += len(sample.timestamps_unix_ns)
                weights[sample.wait.cause.label] += sample.weight
    # Long waits are all sampled; the others are too few to count on if the disk is fast.
    assert found[cause] >= (1 if cause in OF_FILES else 20), (found, done.stderr)
    # A process may wait for pages or locks of the kernel on its way out.
    assert found.total() - found[cause] <= max(2, found.total() // 100), found
    assert weights[cause] >= 0.9 * weights.total(), weights


def test_the_doctor_says_whether_waits_can_be_followed():
    command = [sys.executable, "-m", "otel_kprofiler", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (found,) = [
        one for one in json.loads(done.stdout)["findings"] if one["check"] == "off-CPU time"
    ]
    assert found["level"] == "ok", found
    assert re.fullmatch(r"counted of \d+ processes", found["observed"])
