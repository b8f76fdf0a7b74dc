"""uWSGI workers profile themselves regardless of how they are forked."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from otel_kprofiler.otlp import decode_windows
from tests.further import further_of
from tests.servers import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.live

SERVICE = """
import json, os, time
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from otel_kprofiler import KernelProfiler
from otel_kprofiler.sdk import read_process_context

trace.set_tracer_provider(TracerProvider())
profiler = KernelProfiler.from_env()

def start():
    profiler.start("raise")

if os.environ["STARTS_AT"] == "postfork":
    from uwsgidecorators import postfork
    postfork(start)
else:
    start()

def application(environ, start_response):
    with trace.get_tracer("shop").start_as_current_span("request") as span:
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            os.listdir("/proc/self/task")
    start_response("200 OK", [])
    stats = profiler.stats()
    context = read_process_context(os.getpid())
    return [json.dumps({
        "pid": os.getpid(),
        "trace": f"{span.get_span_context().trace_id:032x}",
        "state": stats["state"],
        "source": stats.get("span_links", {}).get("source"),
        "published": context is not None and context.resource["service.name"],
    }).encode()]
"""
WAYS = {
    "import": ("import", ["--master", "--enable-threads"]),
    "postfork": ("postfork", ["--master", "--enable-threads"]),
    "lazy-apps": ("import", ["--master", "--enable-threads", "--lazy-apps"]),
    "py-call-osafterfork": ("import", ["--master", "--enable-threads", "--py-call-osafterfork"]),
    "no master": ("import", ["--threads=2"]),
}
ENOUGH = 50


@contextlib.contextmanager
def uwsgi(directory, options, env):
    """Runs a server with two workers, and yields its address, its process and its log."""
    address = f"127.0.0.1:{free_port()}"
    program = Path(sysconfig.get_path("scripts")) / "uwsgi"
    command = [program, f"--http-socket={address}", "--processes=2", "--module=shop"]
    command += ["--need-app", "--die-on-term", *options]
    if sys.prefix != sys.base_prefix:
        command.append(f"--virtualenv={sys.prefix}")
    log = directory / "log"
    with log.open("w") as out:
        server = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, **env},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            yield address, server, log
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def ask(address):
    url = f"http://{address}/"
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def has_ended(server):
    server.poll()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, 0)
        return False
    return True


def serve(address, server, log):
    """Sends requests until both workers have been profiled, and returns all responses."""
    answers = []
    with ThreadPoolExecutor(4) as clients:

        def are_profiled():
            assert server.poll() is None, log.read_text()
            answers.extend(filter(None, clients.map(ask, [address] * 4)))
            return len({a["pid"] for a in answers if a["state"] == "running"}) >= 2

        wait_until(are_profiled, 120, lambda: answers)
        for _ in range(3):
            are_profiled()
    return answers


def is_idle(pid):
    """Returns whether a worker's main thread is waiting for a request."""
    return Path(f"/proc/{pid}/wchan").read_text() in {"ep_poll", "do_epoll_wait"}


def functions_of(sample):
    frames = [frame for side in sample.stack.sides for frame in side.frames]
    return {line.function for frame in frames for line in frame.lines}


def read_samples(receiver):
    return [
        (
            resource.attributes["process.pid"],
            sample.link and sample.link.trace_id.hex(),
            functions_of(sample),
        )
        for payload in receiver.accepted["application/x-protobuf"]
        for window in decode_windows(payload)
        for resource, sample in window.samples
        for _ in sample.timestamps_unix_ns
    ]


def environment(receiver, starts_at):
    return {
        "STARTS_AT": starts_at,
        "OTEL_SERVICE_NAME": "shop",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.http,
        "OTEL_KPROFILER_SAMPLES_PER_SECOND": "499",
        "OTEL_KPROFILER_REPORTER_INTERVAL": "60s",
    }


@pytest.mark.parametrize("way", further_of(WAYS, ("import",)))
def test_uwsgi_workers_profile_themselves(receiver, tmp_path, way):
    """All samples belong to workers and their traces, and arrive only when the workers stop."""
    starts_at, options = WAYS[way]
    (tmp_path / "shop.py").write_text(SERVICE)
    env = environment(receiver, starts_at)
    with uwsgi(tmp_path, options, env) as (address, server, log):
        answers = serve(address, server, log)
        # A busy uWSGI worker would exit without running atexit handlers.
        wait_until(lambda: all(is_idle(answer["pid"]) for answer in answers))
        # A worker that is interrupted twice exits without running atexit handlers, and the master
        # interrupts its workers.
        for pid in [server.pid] if "--master" in options else {answer["pid"] for answer in answers}:
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: has_ended(server))
    traces = {}
    for answer in answers:
        traces.setdefault(answer["pid"], set()).add(answer["trace"])
        if answer["state"] == "running":
            assert (answer["source"], answer["published"]) == ("interpreter", "shop")
    assert server.pid not in traces or "--master" not in options
    samples = read_samples(receiver)
    assert {pid for pid, _, _ in samples} == traces.keys(), log.read_text()
    linked = [(pid, trace) for pid, trace, _ in samples if trace]
    assert len(linked) > ENOUGH, (len(samples), len(answers), log.read_text())
    assert all(trace in traces[pid] for pid, trace in linked)
    assert sum("application" in functions for _, _, functions in samples) > ENOUGH
    assert receiver.refused == []


@pytest.mark.long
def test_signals_sent_to_workers_are_not_delivered_to_profiler_threads(receiver, tmp_path):
    """In a profiler thread, a signal would not wake or stop the thread that waits for requests."""
    (tmp_path / "shop.py").write_text(SERVICE)
    starts_at, options = WAYS["import"]
    with uwsgi(tmp_path, options, environment(receiver, starts_at)) as (address, server, log):
        serve(address, server, log)
        os.killpg(server.pid, signal.SIGTERM)  # as systemd does by default
        wait_until(lambda: has_ended(server))
