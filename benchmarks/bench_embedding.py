"""Embedding: the overhead of self-profiling in a service."""

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
from typing import Any, NamedTuple

from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import set_span_in_context

from benchmarks.receiver import Receiver
from benchmarks.rows import Row
from benchmarks.usage import cpu_seconds
from otel_kprofiler.sampling import EbpfSampler
from otel_kprofiler.sampling.events import CpuEvents
from otel_kprofiler.sdk import (
    InMemoryProfileExporter,
    KernelProfiler,
    LocalRootSpanProcessor,
    ProfilerProvider,
    SimpleProfileProcessor,
    pacing,
)

CPUS = sorted(os.sched_getaffinity(0))

SERVICE = """
import os, tempfile
from contextlib import ExitStack
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from otel_kprofiler import KernelProfiler

class Dropping(InMemorySpanExporter):
    def export(self, spans):
        self.clear()
        return super().export(spans)

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(Dropping()))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("service")
profiler = KernelProfiler.from_env()
pauses = ExitStack()
actions = {
    "/start": lambda: profiler.start("raise"),
    "/stop": profiler.stop,
    "/pause": lambda: pauses.enter_context(profiler.paused()),
    "/resume": pauses.close,
}

def work():
    with tracer.start_as_current_span("request"):
        with tempfile.TemporaryFile() as file:
            with tracer.start_as_current_span("write"):
                for _ in range(8):
                    file.write(os.urandom(16384))
                    file.flush()
            file.seek(0)
            with tracer.start_as_current_span("read"):
                sum(file.read())

def app(environ, start_response):
    actions.get(environ["PATH_INFO"], work)()
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"ok"]
"""


class Service(NamedTuple):
    """A gunicorn service with a single worker, whose profiler can be started and stopped."""

    port: int
    pid: int

    def ask(self, path: str = "/", count: int = 1) -> float:
        """Sends ``count`` requests sequentially, and returns the elapsed time in seconds."""
        started = time.perf_counter()
        for _ in range(count):
            connection = http.client.HTTPConnection("127.0.0.1", self.port)
            connection.request("GET", path)
            assert connection.getresponse().read() == b"ok"
            connection.close()
        return time.perf_counter() - started


@contextlib.contextmanager
def services(count: int) -> Iterator[list[Service]]:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        Path(directory, "service.py").write_text(SERVICE)
        receiver = Receiver()
        stack.callback(receiver.close)
        results = []
        for number in range(count):
            with socket.create_server(("127.0.0.1", 0)) as taken:
                port = taken.getsockname()[1]
            pid_file = Path(directory, f"pid{number}")
            hook = Path(directory, f"conf{number}.py")
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
                env={
                    **os.environ,
                    "OTEL_KPROFILER_SAMPLES_PER_SECOND": "99",
                    "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{receiver.endpoint}",
                },
            )
            stack.callback(master.wait)
            stack.callback(master.terminate)
            while not pid_file.exists() or not pid_file.read_text():
                assert master.poll() is None, "gunicorn has ended"
                time.sleep(0.05)
            results.append(Service(port, int(pid_file.read_text())))
        yield results


class Cost(NamedTuple):
    """Elapsed and CPU seconds per request, without and with the profiler, and their ratios."""

    seconds: tuple[float, float]
    cpu_seconds: tuple[float, float]
    seconds_ratio: float
    cpu_ratio: float


def profile_one(plain: Service, profiled_: Service, rounds: int) -> Cost:
    """Measures the cost of a request with and without the profiler.

    The services receive requests alternately, so that any disturbance affects both services. The
    ratio is the median over adjacent batches of requests. The profiler is stopped while the plain
    service handles requests, so that the cost includes the sampler's interrupts on all CPUs.
    Service and client each have a dedicated CPU, because the kernel's choice of CPUs changes the
    results by more than the measured effect.
    """
    batch = 20
    pair = plain, profiled_
    profiled_.ask("/start")
    for service in pair:
        os.sched_setaffinity(service.pid, {CPUS[0]})  # moves only the thread that handles requests
        service.ask(count=3 * batch)
    took: tuple[list[float], list[float]] = ([], [])
    used = [0.0, 0.0]
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            service = pair[which]
            profiled_.ask("/resume" if which else "/pause")
            service.ask(count=2)  # warms up the service's caches again
            before = cpu_seconds(service.pid)
            took[which].append(service.ask(count=batch))
            used[which] += cpu_seconds(service.pid) - before
    profiled_.ask("/resume")
    profiled_.ask("/stop")
    for service in pair:
        os.sched_setaffinity(service.pid, CPUS)  # inherited by threads started later
    seconds = [statistics.median(times) / batch for times in took]
    cpu = [each / rounds / batch for each in used]
    ratio = statistics.median(with_ / without for without, with_ in zip(*took, strict=True))
    return Cost((seconds[0], seconds[1]), (cpu[0], cpu[1]), ratio, cpu[1] / cpu[0])


def requests(rounds: int) -> Iterator[Row]:
    """Yields the cost per request.

    Two services swap roles, so that differences between them cancel out.
    """
    with services(2) as (one, other):
        os.sched_setaffinity(0, {CPUS[-1]})
        try:
            results = [
                cost
                for _ in range(4)
                for cost in (profile_one(one, other, rounds), profile_one(other, one, rounds))
            ]
        finally:
            os.sched_setaffinity(0, CPUS)
    plain_s, profiled_s = (statistics.median(cost.seconds[n] for cost in results) for n in (0, 1))
    yield Row(
        "requests per second, profiled at 99 Hz",
        f"{1 / profiled_s:.4g}",
        f"without {1 / plain_s:.4g}",
        1 / statistics.geometric_mean(cost.seconds_ratio for cost in results),
        "≥ 0.99x",
    )
    plain_s, profiled_s = (
        statistics.median(cost.cpu_seconds[n] for cost in results) for n in (0, 1)
    )
    yield Row(
        "CPU per request, profiled at 99 Hz",
        f"{1000 * profiled_s:.4g} ms",
        f"without {1000 * plain_s:.4g} ms",
        statistics.geometric_mean(cost.cpu_ratio for cost in results),
        "≤ 1.01x",
    )


def change_us(first: Any, second: Any | None) -> float:
    """Returns the duration of a context change (an attach or a detach), in microseconds."""
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
    """Yields the overhead of a running profiler when a thread's current span changes."""
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


def spans() -> Iterator[Row]:
    """Yields the time to start and end a span, without and with the local-root processor."""
    plain, watched = TracerProvider(), TracerProvider()
    for provider in (plain, watched):
        provider.add_span_processor(SpanProcessor())  # as in a service
    watched.add_span_processor(LocalRootSpanProcessor())
    request = {"http.route": "/orders/{id}", "http.request.method": "GET"}
    with profiled():
        for name, attributes, is_root in (
            ("a root span", {}, True),
            ("a request", request, True),
            ("a child span", {}, False),
        ):
            best = [1e9, 1e9]
            for _ in range(2000):
                for which, provider in enumerate((plain, watched)):
                    tracer = provider.get_tracer("bench")
                    root = tracer.start_span("root")
                    context = None if is_root else set_span_in_context(root)
                    started = time.perf_counter()
                    for _ in range(20):
                        tracer.start_span("span", context, attributes=attributes).end()
                    best[which] = min(best[which], time.perf_counter() - started)
                    root.end()
            without, with_ = (seconds / 20 * 1e6 for seconds in best)
            yield Row(
                f"start and end of {name}, for local roots",
                f"+{with_ - without:.2f} µs",
                f"the SDK's own {without:.2f} µs",
                goal="≤ 3 µs",
            )


@contextlib.contextmanager
def profiled(**options: Any) -> Iterator[KernelProfiler]:
    provider = ProfilerProvider(shutdown_on_exit=False)
    provider.add_profile_processor(SimpleProfileProcessor(InMemoryProfileExporter()))
    profiler = KernelProfiler(provider, **{"samples_per_second": 99, **options})
    profiler.start("raise")
    try:
        yield profiler
    finally:
        provider.shutdown()


def holds(seconds: float, rate: int) -> Iterator[Row]:
    """Yields the longest CPU time for which the draining thread held the GIL.

    Excludes existing objects from garbage collection, because their number depends on the service.
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
            result = longest
    finally:
        EbpfSampler.wait, CpuEvents.follow = wait, follow  # type: ignore[method-assign]
        gc.unfreeze()
        pacing.time = time
    yield Row(
        f"longest hold of the interpreter at {rate} Hz",
        f"{result * 1000:.2f} ms",
        f"{samples} samples, a span for each",
        goal="≤ 1 ms",
    )


def rows(quick: bool) -> Iterator[Row]:
    yield from span_changes()
    yield from spans()
    for rate in (99, 999):
        yield from holds(3 if quick else 12, rate)
    yield from requests(10 if quick else 80)
