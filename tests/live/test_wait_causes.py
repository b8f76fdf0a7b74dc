"""``record --off-cpu`` reports the right cause for the waits of test programs.

In ``make test-waits-truth``, each program waits at least 1,000 times.
"""

import contextlib
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from otel_kprofiler.model import OFF_CPU, WaitState
from otel_kprofiler.otlp import check_file, read_profiles
from tests.commands import run_checked, run_command
from tests.further import further_between, further_of
from tests.interpreters import find_pythons
from tests.needs import LIBBPF

pytestmark = [pytest.mark.live, LIBBPF]

WAITS = int(os.environ.get("KPROFILER_WAITS", "0"))  # minimum waits per cause; 0: a few
TIMES = 2 * WAITS or 400

# Each program waits many times for the same reason, in a thread with a distinct name.
FRAME = """
import fcntl, mmap, os, resource, select, signal, socket, sys, threading, time
path, times = sys.argv[1], int(sys.argv[2])
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
def spin_forever():
    while True:
        pass
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
def count(*_):  # a handler that raises ends the system call
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
for _ in range(times * 3 // 4):
    forked(lambda: time.sleep(0.005))
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
    "run_queue": """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
others = [forked(spin_forever) for _ in range(2)]
def count(): return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
named()
until = count() + times * 3 // 4
while count() < until: pass
for other in others: os.kill(other, signal.SIGKILL)""",
    "throttled": """
with open(path + "/cgroup.procs", "w") as file: file.write(str(os.getpid()))
named()
def count():
    with open(path + "/cpu.stat") as file:
        return int(dict(map(str.split, file))["nr_throttled"])
while count() < 2 * times: pass
with open(path + "/../cgroup.procs", "w") as file: file.write(str(os.getpid()))""",
}
GIL = """
sys.setswitchinterval(0.001)
named("spinner")
threading.Thread(target=spin_forever, daemon=True).start()
named()
for _ in range(times): time.sleep(0)"""
OF_FILES = {"disk", "page_fault"}
OF_CPUS = {"run_queue", "throttled"}
OF_MEMORY = {"page_fault", "memory_reclaim", "kernel_lock"}
"""Wait causes that may occur in any thread at any time if the kernel reclaims memory."""


@pytest.fixture
def file(tmp_path):
    """Creates a 32-MB file on a disk rather than in memory."""
    path = tmp_path / "file"
    with open(path, "wb") as made:
        made.write(os.urandom(32 << 20))
        os.fsync(made.fileno())
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the temporary directory is in memory")
    return path


def make_limited_cgroup():
    """Returns a new cgroup limited to 1 ms of CPU time per 2 ms; None if that is impossible."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    for root in [Path(mount[1]) for mount in mounts if mount[2].startswith("cgroup")]:
        made = root / f"kprofiler-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            made.mkdir()
            try:
                if (made / "cpu.max").exists():
                    (made / "cpu.max").write_text("1000 2000")
                    return made
                (made / "cpu.cfs_period_us").write_text("2000")
                (made / "cpu.cfs_quota_us").write_text("1000")
            except OSError:
                made.rmdir()
            else:
                return made
    return None


@pytest.fixture
def half_a_cpu():
    made = make_limited_cgroup()
    if made is None:
        pytest.skip("cannot create a cgroup with a limit of CPU time")
    yield made
    made.rmdir()


@pytest.mark.parametrize(
    "cause",
    further_of(PROGRAMS, ("sleep", "socket_receive", "futex", "disk", "run_queue", "throttled")),
)
def test_waits_in_each_test_program_have_the_expected_cause(cause, request, tmp_path):
    place = ""
    if cause in OF_FILES or cause == "file_lock":
        place = request.getfixturevalue("file")
    if cause == "throttled":
        place = request.getfixturevalue("half_a_cpu")
    result, weights = record_waiter(PROGRAMS[cause], cause, place, tmp_path)
    # Other processes also use the CPU.
    check(cause, result, weights, beside="run_queue" if cause == "throttled" else "")


@pytest.mark.parametrize(
    "python", further_between(find_pythons()), ids=lambda python: python.version
)
def test_waits_for_the_gil_have_the_cause_gil(python, tmp_path):
    """Debian's interpreter has no symbol for the function that takes the GIL."""
    result, weights = record_waiter(GIL, "gil", "", tmp_path, python.command)
    check("gil", result, weights, beside="sleep")  # the main thread also waits for the other thread


def check(cause, found, weights, *, beside=""):
    for other in {beside, *OF_MEMORY} - {cause}:
        del found[other], weights[other]
    # All long waits are sampled, but on a fast disk, few waits are long.
    few = 1 if cause in OF_FILES else 5 if cause == "gil" else TIMES // 2
    assert found[cause] >= (WAITS or few), found
    # On a busy machine, the start and therefore the cause of some waits are unknown.
    share = 0.01 if WAITS else 0.1
    assert found.total() - found[cause] <= max(2, share * found.total()), found
    assert weights[cause] >= 0.9 * weights.total(), weights


def record_waiter(body, cause, place, tmp_path, python=sys.executable):
    """Profiles a waiting thread, and returns its number of waits and their total ns, by cause."""
    written = tmp_path / "waits.otlp"
    program = FRAME.format(body=body)
    words = ["--off-cpu", "--no-on-cpu", "--off-cpu-rate", "10000", "-o", written]
    run_checked("record", *words, "--", python, "-c", program, place, TIMES, timeout=300)
    assert check_file(str(written)) == []
    result, weights = Counter(), Counter()
    for window in read_profiles(str(written)):
        assert {profile.kind for profile in window.profiles} == {OFF_CPU}
        for _, sample in window.samples:
            is_runnable = sample.wait.state is WaitState.RUNNABLE
            if sample.thread_name == "waiter" and is_runnable == (cause in OF_CPUS):
                result[sample.wait.cause.label] += len(sample.timestamps_unix_ns)
                weights[sample.wait.cause.label] += sample.weight
    sys.stdout.write(f"{cause}: {dict(result)}\n")
    return result, weights


def test_the_doctor_reports_that_off_cpu_time_can_be_counted():
    findings = json.loads(run_command("doctor", "--json").stdout)["findings"]
    (result,) = [finding for finding in findings if finding["check"] == "off-CPU time"]
    assert result["level"] == "ok", result
    assert re.fullmatch(r"counted for \d+ processes", result["observed"])
