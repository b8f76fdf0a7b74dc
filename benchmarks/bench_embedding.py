"""Embedding: what a service pays for profiling itself."""

import contextlib
import gc
import http.client
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import set_span_in_context

from benchmarks.receiver import Receiver
from benchmarks.rows import Row
from benchmarks.usage import cpu_seconds
from otel_kprofiler.sampling import EbpfSampler
from otel_kprofiler.sampling.events import CpuEvents
from otel_kprofiler.sdk import (
    InMemoryProfileExporter,
    KernelProfiler,
    ProfilerProvider,
    SimpleProfileProcessor,
    pacing,
)

SERVICE = """
import os, tempfile
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

class Dropping(InMemorySpanExporter):
    def export(self, spans):
        self.clear()
        return super().export(spans)

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(Dropping()))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("service")
if os.environ["PROFILED"] == "1":
    from otel_kprofiler import KernelProfiler
    KernelProfiler.from_env().start("raise")

def app(environ, start_response):
    with tracer.start_as_current_span("request"):
        with tempfile.TemporaryFile() as file:
            with tracer.start_as_current_span("write"):
                for _ in range(8):
                    file.write(os.urandom(16384))
                    file.flush()
            file.seek(0)
            with tracer.start_as_current_span("read"):
                sum(file.read())
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"ok"]
"""


@contextlib.contextmanager
def services(order: str) -> Iterator[list[tuple[int, int]]]:
    """Port and process id of a service without profiles, and of one at 99 Hz, under gunicorn.

    They are started in the order that is given: "01" or "10".
    """
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        Path(directory, "service.py").write_text(SERVICE)
        receiver = Receiver()
        stack.callback(receiver.close)
        started = {}
        for profiled in order:
            with socket.create_server(("127.0.0.1", 0)) as taken:
                port = taken.getsockname()[1]
            pid_file = Path(directory, f"pid{profiled}")
            env = {
                **os.environ,
                "PROFILED": profiled,
                "OTEL_KPROFILER_SAMPLES_PER_SECOND": "99",
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{receiver.endpoint}",
            }
            hook = Path(directory, f"conf{profiled}.py")
            hook.write_text(
                "def post_worker_init(worker):\n"
                f"    open({str(pid_file)!r}, 'w').write(str(worker.pid))\n"
            )
            master = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gunicorn", "--workers", "1", "--chdir", directory),
                    *("--config", str(hook), "--bind", f"127.0.0.1:{port}"),
                    *("--log-level", "warning", "service:app"),
                ],
                env=env,
            )
            stack.callback(master.wait)
            stack.callback(master.terminate)
            while not pid_file.exists() or not pid_file.read_text():
                assert master.poll() is None, "gunicorn has ended"
                time.sleep(0.05)
            started[profiled] = port, int(pid_file.read_text())
        yield [started["0"], started["1"]]


def ask(port: int, count: int) -> float:
    """Seconds for a number of requests, one after the other."""
    started = time.perf_counter()
    for _ in range(count):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/")
        connection.getresponse().read()
        connection.close()
    return time.perf_counter() - started


def side_by_side(order: str, rounds: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Requests per second, and CPU milliseconds per request: without profiles, with, and ratio.

    The two services are asked in turn, so that whatever disturbs disturbs both; the ratio is
    that of two neighbours, at the median.
    """
    batch = 20
    took: tuple[list[float], list[float]] = ([], [])
    with services(order) as pair:
        for port, _ in pair:
            ask(port, 3 * batch)
        before = [cpu_seconds(pid) for _, pid in pair]
        for number in range(rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                took[which].append(ask(pair[which][0], batch))
        cpu = [cpu_seconds(pid) - start for (_, pid), start in zip(pair, before, strict=True)]
    rates = [batch / statistics.median(times) for times in took]
    ratio = statistics.median(without / with_ for without, with_ in zip(*took, strict=True))
    each_ms = [used * 1000 / rounds / batch for used in cpu]
    return (*rates, ratio), (*each_ms, each_ms[1] / each_ms[0])


def requests(rounds: int) -> Iterator[Row]:
    """Each kind of service is the one that was started first once: that alone is worth a few %."""
    found = [side_by_side(order, rounds) for order in ("01", "10")]
    for what, index, unit, goal in (
        ("requests per second, profiled at 99 Hz", 0, "", "≥ 0.99x"),
        ("CPU per request, profiled at 99 Hz", 1, " ms", "≤ 1.01x"),
    ):
        without, profiled_, ratio = map(
            statistics.geometric_mean, zip(*(pair[index] for pair in found), strict=True)
        )
        yield Row(
            what,
            f"{profiled_:.4g}{unit}",
            f"without {without:.4g}{unit}",
            ratio,
            goal,
        )


def change_us(first: Any, second: Any | None) -> float:
    """Microseconds of one change: into a span of a context, or out of it again."""
    attach, detach, best = otel_context.attach, otel_context.detach, 1e9
    outer = attach(first) if second is not None else None
    inner = first if second is None else second
    for _ in range(3000):
        started = time.perf_counter()
        for _ in range(100):
            detach(attach(inner))
        best = min(best, time.perf_counter() - started)
    if outer is not None:
        detach(outer)
    return best / 200 * 1e6


def span_changes() -> Iterator[Row]:
    """The current span of this thread, with its slot and without."""
    tracer = TracerProvider().get_tracer("bench")
    root = set_span_in_context(tracer.start_span("root"))
    child = set_span_in_context(tracer.start_span("child", root), root)
    cases = {"a root span": (root, None), "a child span": (root, child)}
    without = {name: change_us(*case) for name, case in cases.items()}
    with profiled():
        for name, case in cases.items():
            took = change_us(*case)
            yield Row(
                f"change to {name} and back, each",
                f"+{took - without[name]:.2f} µs",
                f"the SDK's own {without[name]:.2f} µs",
                goal="≤ 0.30 µs",
            )


@contextlib.contextmanager
def profiled(**options: Any) -> Iterator[KernelProfiler]:
    """This process, profiled into memory."""
    provider = ProfilerProvider(shutdown_on_exit=False)
    provider.add_profile_processor(SimpleProfileProcessor(InMemoryProfileExporter()))
    profiler = KernelProfiler(provider, **{"samples_per_second": 99, **options})
    profiler.start("raise")
    try:
        yield profiler
    finally:
        provider.shutdown()


def holds(seconds: float, rate: int) -> Iterator[Row]:
    """CPU time of the draining thread between two moments at which it lets others run.

    What was there before is kept out of collections of garbage, whose length is the service's.
    """
    gc.collect()
    gc.freeze()
    longest = since = 0.0
    wait, follow = EbpfSampler.wait, CpuEvents.follow

    def released(function: Any) -> Any:
        def call(*arguments: Any) -> None:
            nonlocal longest, since
            longest = max(longest, time.thread_time() - since)
            function(*arguments)
            since = time.thread_time()

        return call

    tracer = TracerProvider().get_tracer("bench")
    EbpfSampler.wait = released(wait)  # type: ignore[method-assign]
    CpuEvents.follow = released(follow)  # type: ignore[method-assign] # reads of files
    pacing.time = SimpleNamespace(  # type: ignore[assignment]
        thread_time=time.thread_time, sleep=released(time.sleep)
    )
    try:
        with profiled(samples_per_second=rate, stacks="both") as profiler:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                with tracer.start_as_current_span("work"):
                    os.listdir("/proc/self/task")
            samples = profiler.stats()["account"]["taken"]
            found = longest
    finally:
        EbpfSampler.wait, CpuEvents.follow = wait, follow  # type: ignore[method-assign]
        gc.unfreeze()
        pacing.time = time
    yield Row(
        f"longest hold of the interpreter at {rate} Hz",
        f"{found * 1000:.2f} ms",
        f"{samples} samples, a span for each",
        goal="≤ 1 ms",
    )


def rows(quick: bool) -> Iterator[Row]:
    """The rows of this topic."""
    yield from span_changes()
    for rate in (99, 999):
        yield from holds(3 if quick else 12, rate)
    yield from requests(20 if quick else 250)
