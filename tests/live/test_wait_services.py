"""A service samples only the waits of its own threads, with causes, spans and totals."""

import json
import os
import sys
from collections import Counter

import pytest
from services import ask, is_answered, run

from otel_kprofiler.model import OFF_CPU
from otel_kprofiler.otlp import read_profiles
from tests.commands import run_checked
from tests.needs import LIBBPF
from tests.processes import LoggedProcess

pytestmark = [pytest.mark.live, LIBBPF]

SERVICE = """
    import json, os, time
    from dataclasses import replace
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from otel_kprofiler import KernelProfiler

    trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
    profiler = KernelProfiler.from_env()
    sampler = profiler._plan.sampler
    if sampler.off_cpu:  # even a busy machine has fewer waits
        every = replace(sampler.off_cpu, samples_per_second=10_000)
        profiler._plan = replace(profiler._plan, sampler=replace(sampler, off_cpu=every))
    profiler.start("raise")
    truth = {}
    for _ in range(40):
        with trace.get_tracer("service").start_as_current_span("request") as span:
            start = time.monotonic_ns()
            time.sleep(0.05)
            truth[f"{span.get_span_context().span_id:016x}"] = time.monotonic_ns() - start
    profiler.stop()
    print(json.dumps([os.getpid(), truth]))
"""


def test_waits_are_linked_to_the_waiting_threads_span(to_file):
    done = run(SERVICE, env={**to_file.env, "OTEL_KPROFILER_OFF_CPU": "true"})
    pid, truth = json.loads(done.stdout)
    slept, pids = Counter(), set()
    exact = 0
    for window in read_profiles(str(to_file.path)):
        for profile in window.profiles:
            if profile.kind != OFF_CPU:
                continue
            for group in profile.resources:
                pids.add(group.resource.attributes["process.pid"])
                exact += group.waits.total_ns if group.waits else 0
            for _, sample in profile.samples:
                if sample.link and sample.wait.cause.label == "sleep":
                    slept[sample.link.span_id.hex()] += sample.weight
    assert pids == {pid}
    assert exact >= sum(truth.values())
    # Sleeps of 50 ms exceed the sampling threshold, so they are sampled with their full duration.
    known = [span for span in truth if span in slept]
    assert len(known) >= len(truth) // 2, (len(known), len(truth))
    # After its sleep, the thread may wait for a CPU.
    close = [span for span in known if 0.049e9 <= slept[span] <= truth[span]]
    assert len(close) >= 0.8 * len(known), {span: (slept[span], truth[span]) for span in known}


def test_waits_are_not_sampled_unless_enabled(to_file):
    run(SERVICE, env=to_file.env)
    if to_file.exists():  # a service that only sleeps may have no on-CPU sample
        windows = read_profiles(str(to_file.path))
        assert OFF_CPU not in {profile.kind for window in windows for profile in window.profiles}


APP = """
import os, threading, time
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from otel_kprofiler import KernelProfiler

trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
tracer = trace.get_tracer("shop")
profiler = KernelProfiler.from_env().start("raise")
truth = os.open("truth", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
locked = threading.Lock()
locked.acquire()

def work(seconds, action):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        action()

def app(environ, start_response):
    with tracer.start_as_current_span("GET /"):
        start = time.monotonic_ns()
        work(0.004, lambda: sum(range(500)))
        time.sleep(0.012)
        work(0.004, lambda: os.listdir("/proc/self/task"))
        locked.acquire(timeout=0.008)
        took = time.monotonic_ns() - start
    os.write(truth, f"{took}\\n".encode())
    start_response("200 OK", [("Content-Length", "0")])
    return []
"""
SPANS = int(os.environ.get("KPROFILER_SPANS", "150"))
# With 150 samples, the standard error is already 4 %.
TOLERANCE = 0.1 if SPANS >= 500 else 0.25


@pytest.mark.long
def test_span_parts_sum_to_the_span_duration(to_file, tmp_path):
    """The parts are code, kernel and waits. Each request to gunicorn logs its duration."""
    place = tmp_path / "socket"
    (tmp_path / "shop.py").write_text(APP)
    command = [
        sys.executable, "-m", "gunicorn", "--workers", "1", "--bind", f"unix:{place}", "shop:app",
    ]  # fmt: skip
    environ = {
        **to_file.env, "OTEL_KPROFILER_OFF_CPU": "true", "OTEL_KPROFILER_STACKS": "both",
        "OTEL_KPROFILER_SAMPLES_PER_SECOND": "499",
    }  # fmt: skip
    with LoggedProcess(command, tmp_path / "log", cwd=tmp_path, environ=environ) as server:
        server.wait_until(lambda: is_answered(place))
        for _ in range(SPANS - 1):
            ask(place, timeout_s=30)
    durations = [int(line) for line in (tmp_path / "truth").read_text().split()]
    parts = report_parts(to_file, durations)
    assert sum(parts.values()) == pytest.approx(sum(durations), rel=TOLERANCE), parts
    assert parts["wait: sleep"] == pytest.approx(0.012e9 * len(durations), rel=0.4)
    assert min(parts["user code"], parts["kernel"]) > 0.0025e9 * len(durations)


LOOP = """
    import asyncio, json, time
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from otel_kprofiler import KernelProfiler

    trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
    profiler = KernelProfiler.from_env().start("raise")
    truth = []
    async def request():
        with trace.get_tracer("service").start_as_current_span("request"):
            start = time.monotonic_ns()
            for _ in range(5):
                work(0.004)
                await asyncio.sleep(0.06)  # the loop is idle, also on a busy host
            work(0.004)
            truth.append(time.monotonic_ns() - start)
    async def client():
        for _ in range(8):
            await request()
    async def background():
        while True:
            work(0.002)
            await asyncio.sleep(0.02)
    async def main():
        other = asyncio.create_task(background())
        await asyncio.gather(*[client() for _ in range(3)])
        other.cancel()
    asyncio.run(main())
    profiler.stop()
    print(json.dumps(truth))
"""


def test_parts_of_asynchronous_spans_include_other_work_of_the_event_loop(to_file):
    env = {**to_file.env, "OTEL_KPROFILER_OFF_CPU": "true", "OTEL_KPROFILER_STACKS": "both"}
    durations = json.loads(run(LOOP, env=env).stdout)
    parts = report_parts(to_file, durations)
    assert sum(parts.values()) == pytest.approx(sum(durations), rel=TOLERANCE), parts
    own = parts.get("user code", 0) + parts["kernel"]
    assert own == pytest.approx(6 * 0.004e9 * len(durations), rel=0.3)
    assert parts["other tasks"] > own / 4
    assert parts["event loop waited"] > 0


def report_parts(file, durations):
    result = json.loads(run_checked("report", "--by", "part", "--json", file.path).stdout)
    assert result["traces"] == pytest.approx(len(durations), rel=0.05)
    share = result["total"] / sum(durations)
    sys.stdout.write(f"{result['traces']} of {len(durations)} spans, {share:.1%} of their time\n")
    return {group["name"]: group["self"] for group in result["groups"]}
