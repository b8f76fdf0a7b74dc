"""Services that profile themselves send traces and profiles to a real Collector."""

import bisect
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.commands import run_checked
from tests.further import further
from tests.processes import LoggedProcess
from tests.servers import free_port
from tests.waiting import wait_until
from tests.warnings_of_load import without_lost_records

pytestmark = [pytest.mark.live]

SERVICES = Path(__file__).parent / "services"
EXAMPLES = Path(__file__).parents[2] / "examples"
BIN = Path(sys.executable).parent


def environment(collector, **more):
    return {
        **os.environ,
        "OTEL_SERVICE_NAME": "service",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.http_endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_KPROFILER_SAMPLES_PER_SECOND": "999",
        "OTEL_KPROFILER_STACKS": "both",
        "OTEL_KPROFILER_REPORTER_INTERVAL": "1s",
        "OTEL_BSP_MAX_QUEUE_SIZE": str(1 << 20),  # so that no span is dropped
        "PYTHONPATH": str(SERVICES),
        **more,
    }


def gunicorn(port, app, *options):
    return [
        sys.executable, "-m", "gunicorn", "--workers", "2", "--bind", f"127.0.0.1:{port}",
        "--log-level", "warning", *options, app,
    ]  # fmt: skip


def get(port):
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b""))


@contextlib.contextmanager
def running(command, port, env, log):
    """Runs a service during the block, and asserts that it then exits cleanly on SIGTERM."""

    def is_serving():
        with contextlib.suppress(OSError):
            return get(port)

    with LoggedProcess(command, log, env=env) as service:
        service.wait_until(is_serving)
        yield
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(120) == 0, service.log
    assert "Traceback" not in service.log, service.log


def load(port, seconds, clients=4):
    end = time.monotonic() + seconds
    answers = []

    def ask(_):
        while time.monotonic() < end:
            answers.append(get(port))

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, range(clients)))
    assert all(b"200 OK" in answer for answer in answers)
    return len(answers)


def spans_of(collector):
    """Returns start and end of each span that the Collector received, by (trace id, span id)."""
    results = {}
    for line in collector.traces.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    results[span["traceId"], span["spanId"]] = (
                        int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"]),
                    )  # fmt: skip
    return results


def steps_of(directory):
    """Reads the service's logs, and returns the times and spans of each thread."""
    threads = {}
    for path in directory.iterdir():
        for line in path.read_text().splitlines():
            time_ns, tid, *span = line.split()
            times, spans = threads.setdefault(int(tid), ([], []))
            times.append(int(time_ns))
            spans.append(None if span == ["-", "-"] else tuple(span))
    return threads


def check_links(samples, spans, threads):
    """Checks samples against the span log.

    Returns the numbers of linked samples, of samples in spans, and of samples linked to their span.
    """
    linked = inside = right = 0
    for _resource, _kind, _period, attributes, _stack, link, time_ns in samples:
        tid = dict(attributes)["thread.id"]
        span = None if link == ("", "") else link
        if span is not None:
            linked += 1
            start, end = spans[span]  # a KeyError if the Collector lacks the span
            assert start <= time_ns <= end, (span, time_ns, start, end)
            assert tid in threads, f"thread {tid} has run no span"
        if tid not in threads:
            continue
        times, logged = threads[tid]
        at = bisect.bisect(times, time_ns)
        current = logged[at - 1] if at else None
        if current is not None:
            inside += 1
            assert span in {None, current}, (tid, time_ns, span, current)
            right += span == current
        elif span is not None:
            # Either the span changes between two log entries, so both spans are correct, or asyncio
            # runs a callback in the context of a task that this thread has begun and will resume.
            near = logged[max(0, at - 2) : at + 1]
            assert span in near or (span in logged[:at] and span in logged[at:]), (tid, time_ns)
    return linked, inside, right


def linked_samples(collector, samples_of):
    return [sample for sample in samples_of(collector.arrived()) if sample[5] != ("", "")]


def load_until(condition, port, seconds):
    """Runs a load for at least ``seconds`` and until a condition holds."""

    def is_met():
        load(port, 1)
        return condition()

    load(port, seconds - 1)
    wait_until(is_met, 240)


def report_by_span(path):
    (kind,) = json.loads(run_checked("report", "--json", "--by", "span", path).stdout)["kinds"]
    return {
        (row["place"] or "", row["name"] if row["place"] else ""): row["samples"]
        for row in kind["groups"]
    }


@pytest.fixture
def step_log(tmp_path):
    directory = tmp_path / "steps"
    directory.mkdir()
    return directory


@pytest.mark.parametrize("kind", ["wsgi-instrumented", *further("asyncio", "wsgi")])
def test_span_links_agree_with_the_service_log_and_the_traces(
    kind, open_collector, samples_of, step_log, tmp_path
):
    """No link is wrong, 1000 samples are linked, and 99 % of samples in a span link to the span."""
    collector = open_collector()
    port = free_port()
    env = environment(collector, STEP_LOG=str(step_log), START_PROFILER="1")
    command = [sys.executable, str(SERVICES / "asyncio_logged.py"), str(port)]
    if kind != "asyncio":
        command = gunicorn(port, "wsgi_logged:app", "--threads", "2")
    if kind == "wsgi-instrumented":
        env["START_PROFILER"] = "0"
        command = [str(BIN / "opentelemetry-instrument"), *command]
    with running(command, port, env, tmp_path / "service.log"):
        load_until(lambda: len(linked_samples(collector, samples_of)) >= 1000, port, 3)
    collector.stop()
    samples = samples_of(collector.arrived())
    linked, inside, right = check_links(samples, spans_of(collector), steps_of(step_log))
    print(f"{linked} linked of {len(samples)}; {right} of {inside} inside a span")  # noqa: T201
    assert linked >= 1000
    assert right >= 0.99 * inside
    assert {dict(resource)["service.name"] for resource, *_ in samples} == {"service"}
    assert report_by_span(collector.output) == Counter(link for *_, link, _ in samples)
    pids = {dict(resource)["process.pid"] for resource, *_ in samples}
    assert len(pids) >= (1 if kind == "asyncio" else 2)


def names_of(stacks):
    return {name for stack in stacks for _, _, names in stack for name in names}


def test_all_signals_of_the_wsgi_example_have_equal_resources(open_collector, samples_of, tmp_path):
    collector = open_collector()
    port = free_port()
    env = environment(collector, OTEL_KPROFILER_STACKS="kernel", PYTHONPATH=str(EXAMPLES))
    names = {"vfs_write", "vfs_read", "shmem_file_write_iter", "ext4_file_write_iter"}

    def is_seen():
        stacks = (stack for *_, stack, _, _ in linked_samples(collector, samples_of))
        return names_of(stacks) & names

    with running(gunicorn(port, "wsgi_service:app"), port, env, tmp_path / "log"):
        load_until(is_seen, port, 4)
    collector.stop()
    samples = samples_of(collector.arrived())
    traced = collector.traces.read_text()
    (ids,) = {
        tuple(value for key, value in resource if key == "service.name") for resource, *_ in samples
    }
    assert ids == ("service",)
    instances = {dict(resource).get("service.instance.id") for resource, *_ in samples}
    assert all(instance in traced for instance in instances if instance)
    assert '"requests"' in collector.metrics.read_text()
    spans = spans_of(collector)
    assert all(link in spans for *_, link, _ in linked_samples(collector, samples_of))


def test_linked_kernel_samples_of_the_asyncio_example_lie_within_their_spans(
    open_collector, samples_of, tmp_path
):
    collector = open_collector()
    port = free_port()
    env = environment(collector, OTEL_KPROFILER_STACKS="kernel")
    command = [sys.executable, str(EXAMPLES / "asyncio_service.py"), str(port)]
    with running(command, port, env, tmp_path / "log"):
        load_until(lambda: len(linked_samples(collector, samples_of)) > 20, port, 4)
    collector.stop()
    spans = spans_of(collector)
    for *_, link, time_ns in linked_samples(collector, samples_of):
        start, end = spans[link]
        assert start <= time_ns <= end


def test_samples_of_the_batch_example_are_not_linked_to_a_span(open_collector, samples_of):
    collector = open_collector()
    env = environment(
        collector, OTEL_EXPORTER_OTLP_ENDPOINT=collector.grpc_endpoint,
        OTEL_EXPORTER_OTLP_PROTOCOL="grpc", OTEL_EXPORTER_OTLP_INSECURE="true",
        OTEL_KPROFILER_STACKS="kernel",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, EXAMPLES / "batch_job.py", "2000"],
        env=env, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert without_lost_records(done.stderr) == ""
    taken = int(done.stdout.splitlines()[1].split()[0])
    collector.stop()
    samples = samples_of(collector.arrived())
    assert len(samples) == taken > 50
    assert {link for *_, link, _ in samples} == {("", "")}
    assert report_by_span(collector.output) == {("", ""): taken}
