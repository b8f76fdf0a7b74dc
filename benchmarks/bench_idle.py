"""Measures CPU time and wake-ups, by thread, for an agent that has nothing to sample.

The first two cases sample only one process, which sleeps or wakes occasionally, as on an idle host.
Neither of these cases requires an idle host. The last case uses the defaults and is meaningful only
on an idle host, because other work adds samples.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.bench_agent import AgentRun
from benchmarks.receiver import Receiver
from benchmarks.rows import Row

SETTLE_S = 15.0
"""Time in seconds until start-up threads have exited and empty windows have reached full length."""
GOAL = "<= 0.15 %"
_SHOWN = 3
_WAKING = """
import time
while True:
    time.sleep(0.05)
    sum(range(50_000))
"""


class Activity(NamedTuple):
    """A process's CPU seconds and wake-ups since its start, by thread name."""

    cpu_s: Counter[str]
    wakes: Counter[str]

    @classmethod
    def of(cls, pid: int) -> "Activity":
        cpu_s, wakes = Counter[str](), Counter[str]()
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread exited
                thread = (task / "comm").read_text().strip()
                status = dict(
                    line.split(":\t", 1) for line in (task / "status").read_text().splitlines()
                )
                cpu_s[thread] += int((task / "schedstat").read_text().split()[0]) / 1e9
                wakes[thread] += int(status["voluntary_ctxt_switches"])
        return cls(cpu_s, wakes)


def rows(quick: bool) -> Iterator[Row]:
    """Yields CPU time and wake-ups for a sleeping process, a waking process and this host."""
    seconds = 20 if quick else 60
    for name, command in (
        ("a process that sleeps", ["sleep", "infinity"]),
        ("a process that wakes", [sys.executable, "-c", _WAKING]),
    ):
        process = subprocess.Popen(command)
        try:
            yield from _run(name, {"target_pids": [process.pid]}, seconds)
        finally:
            process.kill()
            process.wait()
    yield from _run("this host", {}, seconds)


def _run(name: str, receiver_keys: dict[str, object], seconds: int) -> Iterator[Row]:
    receiver = Receiver()
    with tempfile.TemporaryDirectory() as directory:
        agent = AgentRun(directory, receiver.endpoint, **receiver_keys)
        time.sleep(SETTLE_S)
        earlier, began = Activity.of(agent.process.pid), time.monotonic()
        time.sleep(seconds)
        later, took = Activity.of(agent.process.pid), time.monotonic() - began
        samples = agent.stop()["taken"]
    receiver.close()
    cpu_s = Counter({thread: later.cpu_s[thread] - earlier.cpu_s[thread] for thread in later.cpu_s})
    wakes = Counter({thread: later.wakes[thread] - earlier.wakes[thread] for thread in later.wakes})
    share = cpu_s.total() / took
    yield Row(f"CPU, {name}", f"{share:.3%} of a core", f"{samples} samples", goal=GOAL)
    yield Row(f"wake-ups, {name}", f"{wakes.total() / took:.1f} a second")
    for thread, spent in cpu_s.most_common(_SHOWN):
        yield Row(
            f"thread {thread}, {name}",
            f"{spent / took:.3%} of a core",
            f"{wakes[thread] / took:.1f} wake-ups a second",
        )
