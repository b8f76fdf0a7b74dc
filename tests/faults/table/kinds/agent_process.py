"""Faults that stop, signal, limit, slow down or trace the agent's process."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

from tests.faults.table.scenario import Scenario, beside, repeatedly, wait

FREEZE, SIGNAL, LIMIT = "freeze", "signal", "limit of the process"
SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGCHLD",
           "SIGCONT", "SIGWINCH", "SIGURG", "SIGIO", "SIGTTIN", "SIGTTOU", "SIGXFSZ",
           "SIGRTMIN", "SIGHUP")  # fmt: skip
CGROUPS = Path("/sys/fs/cgroup")


def freeze(seconds, times=1):
    def fault(run):
        for _ in range(times):
            run.process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            run.process.send_signal(signal.SIGCONT)
            time.sleep(min(seconds, 1.5))

    return fault


def signals(number):
    return repeatedly(lambda run: run.process.send_signal(number), 0.0005)


def queued(run):
    """Sends as many real-time signals as the kernel can queue, in one burst."""
    for _ in range(50_000):
        with contextlib.suppress(OSError):
            run.process.send_signal(signal.SIGRTMIN + 3)
    time.sleep(2)


def limited(which, value, after=None):
    """Returns a fault that lowers one of the agent's soft resource limits, and then restores it."""

    def fault(run):
        before = resource.prlimit(run.process.pid, which)
        resource.prlimit(run.process.pid, which, (value, before[1]))
        if after:
            after(run)
        wait(run)
        resource.prlimit(run.process.pid, which, before)
        time.sleep(1)

    return fault


def forks(run):
    run.python("import os\nfor _ in range(3000):\n os.fork() or os._exit(0)\n os.wait()")


def hogs(run, count=8, code="while True: pass"):
    for _ in range(count):
        run.python(code)


def scheduled(change):
    """Changes the scheduling policy of each agent thread while eight busy processes run."""

    def fault(run):
        for thread in os.listdir(f"/proc/{run.process.pid}/task"):
            change(int(thread))
        hogs(run)
        wait(run)

    return fault


@contextlib.contextmanager
def cgroup(run, controller, **values):
    """Moves the agent into a v1 cgroup with the given settings."""
    place = CGROUPS / controller / f"kprofiler-fault-{run.process.pid}"
    before = CGROUPS / controller / read_cgroup(controller).lstrip("/")
    place.mkdir()
    for name, value in values.items():
        (place / f"{controller}.{name}").write_text(str(value))
    (place / "cgroup.procs").write_text(str(run.process.pid))
    try:
        yield place
    finally:
        (before / "cgroup.procs").write_text(str(run.process.pid))
        remove_cgroup(place)


def remove_cgroup(place):
    end = time.monotonic() + 5
    while place.exists():
        try:
            place.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def read_cgroup(controller):
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path
    raise RuntimeError(f"no cgroup has the controller {controller}")


def in_cgroup(controller, **values):
    def fault(run):
        with cgroup(run, controller, **values):
            wait(run)
        time.sleep(1)

    return fault


def frozen(run):
    """Freezes the agent with the cgroup freezer, as when a container is paused."""
    with cgroup(run, "freezer") as place:
        (place / "freezer.state").write_text("FROZEN")
        time.sleep(3)
        (place / "freezer.state").write_text("THAWED")
        time.sleep(0.5)
    time.sleep(1)


def debugged(run):
    command = ["gdb", "-p", str(run.process.pid), "-batch", "-ex", "thread apply all bt 3"]
    subprocess.run(command, capture_output=True, timeout=60, check=False)
    time.sleep(1)


def move_between_cgroups(run):
    with cgroup(run, "cpu"):
        time.sleep(0.1)


def loop(name, fault, kind=LIMIT, **more):
    if kind is FREEZE:
        more["others"] = "the agent is stopped"
    return Scenario(kind, name, fault, **more)


SCENARIOS = [
    *[loop(f"{seconds} s", freeze(seconds), FREEZE) for seconds in (1, 3, 6)],
    loop("20 times 100 ms", freeze(0.1, 20), FREEZE),
    loop("three times 2 s", freeze(2, 3), FREEZE),
    loop("3 s in the cgroup freezer", frozen, FREEZE),
    loop("a debugger lists all stacks", debugged, FREEZE),
    *[loop(f"{name}, 2,000 a second", signals(getattr(signal, name)), SIGNAL) for name in SIGNALS],
    loop("50,000 real-time signals in one burst", queued, SIGNAL),
    loop("no descriptor is free", limited(resource.RLIMIT_NOFILE, 1, forks)),
    loop("file size is limited to 0 bytes", limited(resource.RLIMIT_FSIZE, 1 << 40)),
    loop("no process can be started", limited(resource.RLIMIT_NPROC, 0)),
    loop("stack of 64 KiB", limited(resource.RLIMIT_STACK, 65536)),
    loop("no memory can be locked", limited(resource.RLIMIT_MEMLOCK, 0, forks)),
    loop("no signal can be queued", limited(resource.RLIMIT_SIGPENDING, 0)),
    loop("address space cannot grow", limited(resource.RLIMIT_AS, 1 << 30, forks)),
    loop("scheduling policy SCHED_IDLE, alongside eight busy processes", alone=True,
         fault=scheduled(
        lambda thread: os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0)))),
    loop("nice 19, alongside eight busy processes", scheduled(
        lambda thread: os.setpriority(os.PRIO_PROCESS, thread, 19)), alone=True),
    loop("all threads on one CPU, alongside eight busy processes", scheduled(
        lambda thread: os.sched_setaffinity(thread, {0})), alone=True),
    loop("cgroup limited to a fifth of a CPU",
         in_cgroup("cpu", cfs_period_us=100_000, cfs_quota_us=20_000)),
    loop("cgroup with 2 CPU shares", in_cgroup("cpu", shares=2), others="the agent hardly runs"),
    loop("cgroup with 256 MB of memory", in_cgroup("memory", limit_in_bytes=256 << 20)),
    loop("agent is moved between cgroups ten times a second", repeatedly(move_between_cgroups)),
    loop("sampled by perf at 999 Hz", beside(lambda run: run.start(
        "perf", "record", "-g", "-F", 999, "-p", run.process.pid, "-o", "/dev/null", root=True))),
]  # fmt: skip
