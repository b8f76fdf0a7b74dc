"""Measures the agent's cost per sample by replaying a recording of a steady load.

``RECORDING=FILE`` replays a file written by ``record --raw FILE``, so that two trees measure the
same samples: ``RECORDING=steady.raw python -m benchmarks.compare BASE replay``.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.peer_load import user_load
from benchmarks.rows import Row
from otel_kprofiler.agent.memory import settle
from otel_kprofiler.delivery import encode
from otel_kprofiler.model import Encoding, Window
from otel_kprofiler.pipeline import WindowSchedule, replay
from otel_kprofiler.recording import Recording

WINDOW_NS = 5_000_000_000
WINDOWS = 6
"""The first window is not measured, because it includes start-up with empty caches."""


class Costs(NamedTuple):
    """CPU time and number of samples in all windows but the first."""

    resolving_s: float
    encoding_s: float
    samples: int


def record(path: str, seconds: float) -> None:
    """Records named kernel and user stacks, only for the processes in the steady load."""
    with user_load(seconds + 30, without={"node"}) as pids:
        time.sleep(5)  # until all load programs are running
        command = [sys.executable, "-m", "otel_kprofiler", "record", "-d", f"{seconds}s"]
        options = ["--stacks", "both", "--user-symbols", "names", "--raw", path]
        targets = [word for pid in pids for word in ("-p", str(pid))]
        output = ["-o", f"{path}.folded"]
        subprocess.run(
            [*command, *options, *targets, *output], check=True, stderr=subprocess.DEVNULL
        )


def measure(path: str) -> Costs:
    """Replays the recording once, with the garbage collector set up as in the agent."""
    settle()
    ends: list[tuple[float, float, int]] = []

    def take(window: Window) -> None:
        began = time.process_time()
        encode(window, Encoding())
        ends.append((began, time.process_time(), window.sample_count))

    with contextlib.closing(Recording(path)) as recording:
        replay(recording, WindowSchedule(WINDOW_NS), take)
    encoding = sum(end - began for began, end, _ in ends[1:])
    resolving = ends[-1][1] - ends[0][1] - encoding
    return Costs(resolving, encoding, sum(samples for *_, samples in ends[1:]))


def measure_python(path: str) -> Costs:
    """Replays the recording in an interpreter that does not load the C library."""
    code = f"import benchmarks.bench_replay as b; print(*b.measure({path!r}))"
    environment = {**os.environ, "KPROFILER_SPEEDUPS": "off"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    resolving_s, encoding_s, samples = done.stdout.split()
    return Costs(float(resolving_s), float(encoding_s), int(samples))


def rows(quick: bool) -> Iterator[Row]:
    """Yields each stage's median CPU time per sample, with the C library and without it."""
    path = os.environ.get("RECORDING")
    costs, in_python = [], []
    with tempfile.TemporaryDirectory() as directory:
        if path is None:
            path = os.path.join(directory, "steady.raw")
            record(path, WINDOWS * WINDOW_NS / 1e9)
        for _ in range(3 if quick else 9):
            costs.append(measure(path))
            in_python.append(measure_python(path))
    for what, seconds in (
        ("resolve and group", lambda cost: cost.resolving_s),
        ("encode", lambda cost: cost.encoding_s),
        ("resolve, group and encode", lambda cost: cost.resolving_s + cost.encoding_s),
    ):
        spent, beside = (
            1e6 * statistics.median([seconds(cost) / cost.samples for cost in measured])
            for measured in (costs, in_python)
        )
        yield Row(
            f"{what}, steady load, whole stacks with names",
            f"{spent:.1f} µs a sample",
            f"{beside:.1f} µs without the C library",
            spent / beside,
        )
