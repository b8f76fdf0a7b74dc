"""The whole agent under a mixed load: CPU, memory, start, and what goes over the wire."""

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
from collections.abc import Iterator

from benchmarks.receiver import Receiver
from benchmarks.rows import Row
from benchmarks.usage import cpu_seconds
from otel_kprofiler.agent.memory import read_resident_bytes


@contextlib.contextmanager
def running(load: str, seconds: float) -> Iterator[None]:
    """A load, which ends by itself: a module of benchmarks."""
    load = subprocess.Popen([sys.executable, "-m", f"benchmarks.{load}", str(seconds)])
    try:
        yield
    finally:
        load.terminate()
        load.wait()


def mixed_load(seconds: float) -> contextlib.AbstractContextManager[None]:
    """The load of :mod:`benchmarks.mixed_load`."""
    return running("mixed_load", seconds)


class AgentRun:
    """``otel-kprofiler run`` with one gRPC exporter, and keys of its receiver."""

    def __init__(self, directory: str, endpoint: str, **receiver: object) -> None:
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
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "otel_kprofiler", "run", "-c", path],
            stdout=subprocess.PIPE,
        )

    def stop(self) -> dict:
        """End it; returns the account that it prints."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=60)
        return json.loads(out)


def perf_cpu(seconds: float, rate: int) -> float | None:
    """Share of one core that ``perf record`` uses, None if it is not installed."""
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
    """CPU and RSS at three rates, kernel stacks and both, with names, and with Python frames."""
    seconds = 8 if quick else 25
    for rate, stacks in ((19, "kernel"), (99, "kernel"), (99, "both"), (999, "both")):
        yield from _run(rate, stacks, seconds)
    yield from _run(99, "both", seconds, "names")
    yield from _run(99, "both", seconds, load="python_load")


def _run(
    rate: int, stacks: str, seconds: int, names: str = "off", load: str = "mixed_load"
) -> Iterator[Row]:
    name = f"{rate} Hz, {stacks} stacks"
    cpu_goal, rss_goal = "<= 1 %" if rate == 99 else "", "<= 60 MB"
    wire_goal = "<= 60 / <= 25" if stacks == "kernel" else "<= 99 / <= 34"
    if load == "python_load":
        name += ", 20 Python processes"
        cpu_goal, wire_goal = "<= 1.2 %", ""
    if names != "off":
        name += f", {names}"
        cpu_goal, rss_goal, wire_goal = "<= 2 %", "<= 80 MB", ""
    receiver = Receiver()
    with tempfile.TemporaryDirectory() as directory, running(load, 2 * seconds + 20):
        time.sleep(1)
        run = AgentRun(
            directory, receiver.endpoint, samples_per_second=rate, stacks=stacks, user_symbols=names
        )
        first = receiver.wait_first(30) - run.started
        time.sleep(2)
        before, began = cpu_seconds(run.process.pid), time.monotonic()
        time.sleep(seconds)
        used = (cpu_seconds(run.process.pid) - before) / (time.monotonic() - began)
        rss = read_resident_bytes(run.process.pid)
        account = run.stop()
        perf = perf_cpu(seconds, rate)
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
        cpu_goal,
    )
    yield Row(f"agent RSS, {name}", f"{rss / 2**20:.1f} MiB", goal=rss_goal)
    yield Row(f"start to first export, {name}", f"{first:.2f} s", goal="<= 1.5 s")
    yield Row(f"wire bytes per sample, {name}", f"{raw:.0f} raw, {zipped:.0f} gzip", goal=wire_goal)
    lost = account["taken"] - samples
    yield Row(f"samples not delivered, {name}", f"{lost} of {account['taken']}", goal="0")
