"""Host-wide changes made by root: CPUs, clocks, kernel settings, other tools."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

from tests.faults.table.scenario import Scenario, beside, repeatedly, wait

KIND = "host"
CPU1 = Path("/sys/devices/system/cpu/cpu1/online")
KERNEL = Path("/proc/sys/kernel")


def hotplug(times, pause_s):
    def fault(run):
        try:
            for _ in range(times):
                CPU1.write_text("0")
                time.sleep(pause_s)
                CPU1.write_text("1")
                time.sleep(pause_s)
        finally:
            CPU1.write_text("1")
        time.sleep(1)

    return fault


def setting(name, value):
    def fault(run):
        path = KERNEL / name
        before = path.read_text()
        try:
            path.write_text(str(value))
            wait(run)
        finally:
            path.write_text(before)
        time.sleep(0.5)

    return fault


def suspend_sampler(run):
    """Makes the kernel throttle the sampler's events, and keeps all CPUs busy."""
    path = KERNEL / "perf_event_max_sample_rate"
    usual = path.read_text()
    run.on_close(lambda: path.write_text(usual))
    path.write_text("200")
    for _ in os.sched_getaffinity(0):
        run.start("sh", "-c", "while :; do :; done")


def expect_warning(run):
    wait(run)
    if "kernel.perf_event_max_sample_rate is 200" not in run.log:
        raise RuntimeError("the agent does not warn that the kernel suspends its sampler")


def clock(seconds, times=1):
    """Sets the wall clock a few seconds forward or back, then restores it."""

    def fault(run):
        for _ in range(times):
            time.clock_settime_ns(time.CLOCK_REALTIME, time.time_ns() + int(seconds * 1e9))
            time.sleep(1.5 / times)
            time.clock_settime_ns(time.CLOCK_REALTIME, time.time_ns() - int(seconds * 1e9))
            time.sleep(1.5 / times)

    return fault


def tool(*words):
    return beside(lambda run: run.start(*words, root=True))


def cgroups(name):
    """Creates and removes named cgroups, each with a process."""

    def fault(run):
        end, number = time.monotonic() + run.seconds, 0
        while time.monotonic() < end:
            place = Path("/sys/fs/cgroup/cpu") / (name % number)
            number += 1
            place.mkdir(parents=True)
            process = run.python("for _ in range(10**6): pass", root=True)
            (place / "cgroup.procs").write_text(str(process.pid))
            process.wait()
            with contextlib.suppress(OSError):
                time.sleep(0.01)
                place.rmdir()

    return fault


def memory(run):
    """Allocates all but 2 GB of the available memory, and releases it later."""
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    run.python(
        "import sys, time\n"
        "held = bytearray(int(sys.argv[1]))\n"
        "for at in range(0, len(held), 4096): held[at] = 1\n"
        "time.sleep(60)", str((free - 2_000_000) * 1024))  # fmt: skip
    time.sleep(run.seconds + 4)


def mount_and_unmount(run):
    place = run.directory / "mounted"
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    subprocess.run(["umount", place], check=True)


def low_pids(run):
    """Limits process ids so that they are reused within a second."""
    path = KERNEL / "pid_max"
    before = path.read_text()
    highest = max(int(name) for name in os.listdir("/proc") if name.isdigit())
    try:
        path.write_text(str(max(highest + 300, 1000)))
        run.python("import os\nwhile True:\n os.fork() or os._exit(0)\n os.wait()")
        wait(run)
    finally:
        path.write_text(before)


def one(name, fault, **more):
    return Scenario(KIND, name, fault, alone=True, **more)


MOVES = "the control program's CPU goes away"
SCENARIOS = [
    one("a CPU goes offline and comes back online", hotplug(1, 1.5), others=MOVES),
    one("a CPU goes offline and comes back online five times", hotplug(5, 0.3), others=MOVES),
    one("clock jumps forward 2 s, then back", clock(2)),
    one("clock jumps back 2 s, then forward", clock(-2)),
    one("clock jumps forward 1 s, then back, ten times", clock(1, 10)),
    one("perf_event_max_sample_rate is 200", expect_warning, before=suspend_sampler, misses=True),
    one("perf_cpu_time_max_percent is 1", setting("perf_cpu_time_max_percent", 1)),
    one("perf_event_paranoid is 3", setting("perf_event_paranoid", 3)),
    one("kptr_restrict is 2", setting("kptr_restrict", 2)),
    one("randomize_va_space is 0", setting("randomize_va_space", 0)),
    one("perf samples all CPUs at 4,999 Hz",
        tool("perf", "record", "-a", "-F", 4999, "-g", "-o", "/dev/null")),
    one("perf traces each context switch", tool("perf", "trace", "-a", "-o", "/dev/null")),
    one("caches are dropped five times a second",
        repeatedly(lambda _: Path("/proc/sys/vm/drop_caches").write_text("3"), 0.2)),
    one("cgroups named like containers are created and removed",
        cgroups("docker-" + "a" * 56 + "%08d.scope")),
    one("cgroups with control characters in their names", cgroups("fault\x1b[2J\r%d")),
    one("all memory except 2 GB is in use", memory),
    one("file systems are mounted and unmounted", repeatedly(mount_and_unmount)),
    one("a real-time process occupies a CPU",  # other processes receive 5 % of the CPU's time
        tool("chrt", "-f", 5, "taskset", "-c", 0, "sh", "-c", "while :; do :; done")),
    one("process ids are reused within a second", low_pids),
]  # fmt: skip
