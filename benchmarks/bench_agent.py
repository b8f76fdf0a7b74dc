"""Measures the agent's CPU time, memory, startup time and network traffic under a mixed load."""

import compileall
import contextlib
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.receiver import Receiver
from benchmarks.rows import Row
from benchmarks.usage import cpu_seconds
from otel_kprofiler.agent.memory import read_resident_bytes

PACKAGE = Path(__file__).parents[1] / "otel_kprofiler"
LOAD_START_S = 6.0
"""The time that the twenty interpreters in the Python load need to start, in seconds."""


@contextlib.contextmanager
def running(load: str, seconds: float) -> Iterator[None]:
    """Runs a load for a fixed time. ``load`` names a module in :mod:`benchmarks`."""
    load = subprocess.Popen([sys.executable, "-m", f"benchmarks.{load}", str(seconds)])
    try:
        yield
    finally:
        load.terminate()
        load.wait()


def mixed_load(seconds: float) -> contextlib.AbstractContextManager[None]:
    return running("mixed_load", seconds)


class AgentRun:
    """An ``otel-kprofiler run`` process with one gRPC exporter and the given receiver settings.

    ``python`` is an interpreter with an installed package, which then runs instead of this clone's.
    """

    def __init__(
        self, directory: str, endpoint: str, *, python: str = "", **receiver: object
    ) -> None:
        path = os.path.join(directory, "agent.yaml")
        with open(path, "w", encoding="ascii") as file:
            file.write(
                f"""
receivers:
  kprofiler: {json.dumps(receiver)}
exporters: {{otlp_grpc: {{endpoint: {endpoint}, tls: {{insecure: true}}}}}}
service: {{pipelines: {{profiles: {{receivers: [kprofiler], exporters: [otlp_grpc]}}}}}}
"""
            )
        compileall.compile_dir(PACKAGE, quiet=1)  # as installers do
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*([python, "-I"] if python else [sys.executable]),
             "-m", "otel_kprofiler", "run", "-c", path],
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def stop(self) -> dict:
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=60)
        kinds: dict = json.loads(out)["account"]
        return kinds["on_cpu"]


def perf_cpu(seconds: float, rate: int) -> float | None:
    """Returns the fraction of one core that ``perf record`` uses; None if perf is not installed."""
    if shutil.which("perf") is None:
        return None
    before = os.times()
    subprocess.run(
        ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(rate), "-a", "-g", "-o", "/dev/null",
         "--", "sleep", str(seconds)],
        check=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    after = os.times()
    used = (after.children_user - before.children_user) + (
        after.children_system - before.children_system
    )
    return used / seconds


def rows(quick: bool) -> Iterator[Row]:
    seconds = 8 if quick else 25
    kernel, both = "<= 60 / <= 25", "<= 99 / <= 34"
    for case in (
        Case("19 Hz, kernel stacks", {"samples_per_second": 19}, "", wire_goal=kernel),
        Case("99 Hz, kernel stacks", {}, "<= 1 %", wire_goal=kernel),
        Case("99 Hz, both stacks", {"stacks": "both", "python_frames": 0}, "<= 1.5 %",
             wire_goal=both),
        Case("99 Hz, both stacks, names", {"stacks": "both", "user_symbols": "names"}, "<= 2 %",
             rss_goal="<= 80 MB"),
        Case("99 Hz, kernel stacks, waits", {"off_cpu": {"enabled": True}}, "<= 2 %"),
        Case("99 Hz, 20 Python processes", {}, "<= 1.2 %", load="python_load"),
        Case("99 Hz, both stacks, 20 Python processes", {"stacks": "both"}, "",
             load="python_load"),
        Case("999 Hz, both stacks", {"samples_per_second": 999, "stacks": "both"}, "",
             rss_goal="", wire_goal=both),
    ):  # fmt: skip
        yield from _run(case, seconds)


class Case(NamedTuple):
    """A load, the agent's receiver settings, and the performance goals."""

    name: str
    receiver: Mapping[str, object]
    cpu_goal: str
    rss_goal: str = "<= 60 MB"
    wire_goal: str = ""
    load: str = "mixed_load"


def _run(case: Case, seconds: int) -> Iterator[Row]:
    name = case.name
    settings = {"samples_per_second": 99, "stacks": "kernel", "user_symbols": "off"}
    settings |= case.receiver
    receiver = Receiver()
    with tempfile.TemporaryDirectory() as directory, running(case.load, 2 * seconds + 30):
        time.sleep(LOAD_START_S)
        run = AgentRun(directory, receiver.endpoint, **settings)
        first = receiver.wait_first(30) - run.started
        time.sleep(2)
        before, began = cpu_seconds(run.process.pid), time.monotonic()
        time.sleep(seconds)
        used = (cpu_seconds(run.process.pid) - before) / (time.monotonic() - began)
        rss = read_resident_bytes(run.process.pid)
        account = run.stop()
        perf = perf_cpu(seconds, settings["samples_per_second"])
    receiver.close()
    payloads = [request for _, request in receiver.requests]
    samples = account["exporters"]["otlp_grpc"]["exported"]
    raw = sum(map(len, payloads)) / max(samples, 1)
    zipped = sum(len(gzip.compress(payload, 6)) for payload in payloads) / max(samples, 1)
    yield Row(
        f"agent CPU, {name}",
        f"{used:.2%} of a core",
        "" if perf is None else f"perf record {perf:.2%}",
        None if not perf else used / perf,
        case.cpu_goal,
    )
    yield Row(f"agent RSS, {name}", f"{rss / 2**20:.1f} MiB", goal=case.rss_goal)
    yield Row(f"start to first export, {name}", f"{first:.2f} s", goal="<= 1.5 s")
    yield Row(
        f"wire bytes per sample, {name}", f"{raw:.0f} raw, {zipped:.0f} gzip", goal=case.wire_goal
    )
    lost = account["taken"] - samples
    yield Row(f"samples not delivered, {name}", f"{lost} of {account['taken']}", goal="0")
