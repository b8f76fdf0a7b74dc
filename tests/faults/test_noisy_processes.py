"""A process with only distinct samples does not cause sample loss for other processes."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter

import pytest

from otel_kprofiler.model import COARSE
from otel_kprofiler.otlp import decode_windows
from tests.faults.accounts import UNHURRIED, check_stream, stop_and_check
from tests.further import further, further_of

pytestmark = pytest.mark.live

RATE = 99
NOBODY, ANOTHER = 65534, 65533
"""Users that run no other processes."""

GOOD = """
volatile unsigned long x;
int main(void) { for (;;) x++; }
"""

NOISY = {
    "renames": """
#include <stdio.h>
#include <sys/prctl.h>
volatile unsigned long x;
int main(void) {
    char name[16];
    for (unsigned long i = 0;; i++) {
        snprintf(name, 16, "%015lx", i * 0x9E3779B97F4A7C15ul >> 4);
        prctl(PR_SET_NAME, name);
        for (int k = 0; k < 100000; k++) x++;
    }
}
""",
    "mappings": """
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__x86_64__)
static const unsigned char code[] = {0xb9, 0, 0, 3, 0, 0xff, 0xc9, 0x75, 0xfc, 0xc3};
#else
static const unsigned int code[] = {0x52a00060, 0x71000400, 0x54ffffe1, 0xd65f03c0};
#endif
int main(void) {
    for (;;) {
        int fd = memfd_create("code", 0);
        void *page;
        ftruncate(fd, 4096);
        write(fd, code, sizeof code);
        page = mmap(0, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
        close(fd);
        ((void (*)(void))page)();
        munmap(page, 4096);
    }
}
""",
    "stacks": """
volatile unsigned long x, seed = 1;
static unsigned random_bits(void) { return (seed = seed * 6364136223846793005ul + 1) >> 33; }
static void (*functions[4])(int);
#define F(n) __attribute__((noinline)) void f##n(int depth) { \\
    if (depth) functions[random_bits() & 3](depth - 1); \\
    else for (int k = 0; k < 100000; k++) x++; \\
    x += n; }
F(0) F(1) F(2) F(3)
int main(void) {
    functions[0] = f0; functions[1] = f1; functions[2] = f2; functions[3] = f3;
    for (;;) f0(20 + random_bits() % 60);
}
""",
    "execs": """
#include <unistd.h>
volatile unsigned long x;
int main(int argc, char **argv) {
    for (int k = 0; k < 300000; k++) x++;
    return execv("/proc/self/exe", argv);
}
""",
}
STORMS = {
    "forks": """
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
volatile unsigned long x;
static void spin(int depth) {
    volatile char stack[16 * (depth % 7 + 1)];
    stack[0] = 0;
    if (depth) spin(depth - 1); else for (int k = 0; k < 3000000; k++) x++;
    stack[0] = 1;
}
int main(void) {
    for (unsigned long i = 0;; i++) {
        if (fork()) { wait(0); continue; }
        char name[16];
        snprintf(name, 16, "%lx", i * 0x9E3779B97F4A7C15ul >> 4);
        prctl(PR_SET_NAME, name);
        spin(i % 50);
        _exit(0);
    }
}
""",
    "executables": """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/wait.h>
#include <unistd.h>
extern char **environ;
volatile unsigned long x;
int main(int count, char **words) {
    if (count > 1) { for (int k = 0; k < 3000000; k++) x++; return 0; }
    for (unsigned long i = 0;; i++) {
        if (fork()) { wait(0); continue; }
        char name[32], *const child[] = {name, "child", 0};
        snprintf(name, sizeof name, "made-%lu", i);
        int from = open("/proc/self/exe", O_RDONLY), to = memfd_create(name, MFD_CLOEXEC);
        while (sendfile(to, from, 0, 1 << 20) > 0) { }
        write(to, &i, sizeof i);
        fexecve(to, child, environ);
        _exit(1);
    }
}
""",
}
"""Programs whose children each have unique names, stacks or files."""
NEW_CODE = """
def f():
    x = 0
    for k in range(2000):
        x += k
number, code = 0, f.__code__
while True:
    number += 1
    f.__code__ = code.replace(co_name=f"f{number}", co_filename=f"/made/{number}.py")
    f()
"""
MIN_S, ENOUGH_NS = 4, 1_000_000_000
"""Minimum duration (s) of a measurement, and minimum CPU time (ns) of the well-behaved process."""
SMALL_BUDGET = """
from otel_kprofiler.pipeline import budget
class Small(budget.CpuShare):
    def __init__(self, share, *_):
        super().__init__(share / 1e6, 3_000_000_000)
budget.CpuShare = Small
budget.GROUP_NS = 20_000_000
"""
"""A budget for 150 groups of samples that is never replenished."""


@contextlib.contextmanager
def running(directory, kind, user=0):
    if kind == "code":
        command = [sys.executable, "-c", NEW_CODE]
    else:
        (directory / f"{kind}.c").write_text({**NOISY, **STORMS}.get(kind, GOOD))
        command = [directory / kind]
        subprocess.run(["gcc", "-O1", "-o", *command, directory / f"{kind}.c"], check=True)
    with subprocess.Popen(command, user=user, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def public_directory():
    with tempfile.TemporaryDirectory(prefix="kprofiler-noisy-") as name:
        os.chmod(name, 0o755)
        yield pathlib.Path(name)


def cpu_ns(pid):
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0])


def wait_until_run(agent, process):
    """Waits until a process has used enough CPU time to be sampled; a storm leaves it little."""
    until_ns = cpu_ns(process.pid) + ENOUGH_NS // 4
    agent.wait_until(lambda: cpu_ns(process.pid) > until_ns, seconds=400)


def samples_of(payloads, pid):
    for payload in payloads:
        for window in decode_windows(payload):
            for profile in window.profiles:
                for resource, sample in profile.samples:
                    if resource.attributes.get("process.pid") == pid:
                        yield sample, len(sample.timestamps_unix_ns)


def count_coarse(agent, kind):
    """Returns the number of samples with reduced stacks; 0 if the agent does not respond."""
    return agent.get("/status")[1].get("coarse_samples", {}).get(kind, 0)


@pytest.mark.parametrize("kind", further_of([*NOISY, *STORMS, "code"], ("stacks",)))
def test_a_noisy_process_costs_other_processes_no_samples(run_agent, receiver, tmp_path, kind):
    receiver.up()
    with running(tmp_path, kind), running(tmp_path, "good") as good:
        agent = run_agent(receiver.endpoint, rate=RATE, interval="1s", more=UNHURRIED)
        before_ns, ends_at = cpu_ns(good.pid), time.monotonic() + MIN_S
        while time.monotonic() < ends_at or cpu_ns(good.pid) < before_ns + ENOUGH_NS:
            assert good.poll() is None
            time.sleep(0.1)
        ran_ns = cpu_ns(good.pid) - before_ns
        account, _, got = stop_and_check(agent, receiver)
    check_stream(got, *got.totals)
    count = sum(number for _, number in samples_of(receiver.payloads, good.pid))
    expected = ran_ns * RATE / 1e9
    assert count > 0.95 * expected - 3 * expected**0.5
    assert not any(account["lost"].values())


def test_only_a_process_above_its_budget_loses_stack_detail(run_agent, receiver, public_directory):
    receiver.up()
    (public_directory / "sitecustomize.py").write_text(SMALL_BUDGET)
    places = [(public_directory, "stacks", NOBODY), (public_directory, "good", ANOTHER)]
    with running(*places[0]) as noisy, running(*places[1]) as good:
        agent = run_agent(
            receiver.endpoint,
            rate=997,
            interval="10s",
            stacks=f"both\n    target_pids: [{noisy.pid}, {good.pid}]",
            environ={"PYTHONPATH": str(public_directory)},
        )
        agent.wait_until(lambda: count_coarse(agent, "stack") > 100)
        agent.wait_until(lambda: count_coarse(agent, "group") > 100)
        wait_until_run(agent, good)
        stop_and_check(agent, receiver)
    marked = {pid: Counter() for pid in (noisy.pid, good.pid)}
    for pid, counts in marked.items():
        for sample, number in samples_of(receiver.payloads, pid):
            counts[dict(sample.labels).get(COARSE)] += number
            if COARSE in dict(sample.labels):
                assert (sample.thread_name, sample.tid) == ("stacks", noisy.pid)
    assert marked[noisy.pid]["true"] > 50
    assert marked[good.pid].keys() == {None}


@pytest.mark.timeout(700)
@pytest.mark.parametrize("kind", ["forks", *further("executables")])
def test_processes_in_a_fork_storm_share_a_budget_and_do_not_affect_other_processes(
    run_agent, receiver, public_directory, kind
):
    receiver.up()
    (public_directory / "sitecustomize.py").write_text(SMALL_BUDGET)
    places = [(public_directory, kind, NOBODY), (public_directory, "good", ANOTHER)]
    with running(*places[0]), running(*places[1]) as good:
        agent = run_agent(
            receiver.endpoint,
            rate=997,
            interval="10s",
            user_symbols="names",
            environ={"PYTHONPATH": str(public_directory)},
        )
        agent.wait_until(lambda: count_coarse(agent, "resource") > 100)
        wait_until_run(agent, good)
        stop_and_check(agent, receiver)
    samples = [sample for sample, _ in samples_of(receiver.payloads, good.pid)]
    assert samples
    assert {sample.thread_name for sample in samples} == {"good"}
    assert not any(COARSE in dict(sample.labels) for sample in samples)
    later = samples[len(samples) // 2 :]
    assert all("main" in {frame.function for frame in sample.stack.frames} for sample in later)
