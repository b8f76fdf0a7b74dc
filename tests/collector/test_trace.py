"""A trace across Node.js, Java and Python services is visible in reports and in ClickHouse."""

import contextlib
import json
import re
import secrets
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from otel_kprofiler.otlp import read_profiles
from tests import java_writer, nodejs_writer, npm
from tests.agents import Agent
from tests.collector.test_clickhouse import DOCS, NEEDS_ENGINE, PATIENCE_S, Engine, gateway, run
from tests.processes import LoggedProcess
from tests.servers import free_ports

pytestmark = [NEEDS_ENGINE, pytest.mark.live, pytest.mark.long]
SERVICES = Path(__file__).parents[1] / "data" / "trace"
TRACES, WORK_MS = 2, 400
"""The number of requests, and how long each span computes, reads and sleeps, in ms."""
ENDPOINTS = {"front": "GET /checkout", "orders": "POST /orders", "stock": "GET /stock/{item}"}
AGENT = """
receivers:
  kprofiler:
    samples_per_second: 499
    stacks: both
    off_cpu: {{enabled: true, samples_per_second_per_cpu: 100}}
    reporter_interval: 1s
    target_pids: {pids}
exporters:
  otlp_grpc: {{endpoint: "{endpoint}", tls: {{insecure: true}}}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [otlp_grpc]}}}}
"""
(RECIPE,) = (
    query
    for query in re.findall(r"```sql\n(.*?)```", DOCS.read_text(), re.DOTALL)
    if "AS waited_ms" in query
)


def ask(port, trace, ms):
    """Sends a request, and returns the times that the services measured for their spans."""
    headers = {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01", "ms": str(ms)}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", headers=headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def is_open(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def services(tmp_path):
    ports = free_ports(3)
    place = npm.install(nodejs_writer.PROGRAM, "nodejs-writer")
    node = npm.node(place)
    java, library = java_writer.unpack(tmp_path)
    commands = [
        [node, "--expose-gc", SERVICES / "front.mjs", place / "node_modules", *ports[:2]],
        [*java, SERVICES / "Orders.java", library, *ports[1:]],
        [
            sys.executable, "-m", "gunicorn", "--chdir", SERVICES,
            "--bind", f"127.0.0.1:{ports[2]}", "stock:app",
        ],
    ]  # fmt: skip
    with contextlib.ExitStack() as running:
        started = [
            running.enter_context(LoggedProcess(command, tmp_path / f"{name}.log"))
            for name, command in zip(ENDPOINTS, commands, strict=True)
        ]
        for process, port in zip(started, ports, strict=True):
            process.wait_until(lambda port=port: is_open(port))
        # the response shows that gunicorn has started its worker
        ask(ports[0], secrets.token_hex(16), 1)
        *pids, master = (process.pid for process in started)
        children = Path(f"/proc/{master}/task/{master}/children").read_text().split()
        yield ports[0], [*pids, *map(int, children)]


def linked_services(file):
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
def recorded(services, collector_program, tmp_path, sampling_host):
    """Yields a ClickHouse server with the profiles, the Collector's file, and measured times."""
    port, pids = services
    engine = Engine(tmp_path / "data")
    try:
        with gateway(collector_program, engine, tmp_path) as (grpc, _, file):
            text = AGENT.format(endpoint=grpc.removeprefix("grpc://"), pids=pids)
            with Agent(tmp_path, text) as agent:
                agent.wait_until_it_samples()

                def has_spans():  # the first samples have no spans
                    ask(port, secrets.token_hex(16), 50)
                    return linked_services(file) == set(ENDPOINTS)

                agent.wait_until(has_spans, PATIENCE_S, lambda: linked_services(file))
                traces = [secrets.token_hex(16) for _ in range(TRACES)]
                measured = {trace: ask(port, trace, WORK_MS) for trace in traces}
                account = agent.stop()
            exported = account["exporters"]["otlp_grpc"]["exported"]
            assert exported == account["taken"] > 0, agent.log
            engine.wait_for(exported)
        yield engine, file, measured
    finally:
        engine.close()


def read_times(source, trace):
    """Returns each span's user, kernel and waiting time in ns, from ``report --by trace``."""
    words = ["--by", "trace", "--json", "--span", trace, source]
    spans = json.loads(run("report", *words))["spans"]
    assert {span["service"]: span["endpoint"] for span in spans} == ENDPOINTS
    assert {span["trace_id"] for span in spans} == {trace}
    return {
        (span["service"], span["span_id"]): (span["user"], span["kernel"], span["waited"])
        for span in spans
    }


def test_report_and_clickhouse_agree_with_the_measured_time_of_each_span(recorded):
    engine, file, measured = recorded
    rows = engine.ask(RECIPE.replace("LIMIT 20", ""))
    for trace, spans in measured.items():
        times = read_times(file, trace)
        assert read_times(engine.address(), trace) == times
        asked = {
            (service, span): [float(part) * 1e6 for part in parts]
            for of, service, span, endpoint, *parts in rows
            if of == trace and ENDPOINTS[service] == endpoint
        }
        assert asked.keys() == times.keys()
        for span in spans:
            key = span["service"], span["span"]
            (user, kernel, waited), (*used, linked) = times.pop(key), asked[key]
            assert [user, kernel] == pytest.approx(span["used"], rel=0.2), (span, times)
            assert waited == pytest.approx(span["waited"], rel=0.3), (span, times)
            assert used == pytest.approx([user, kernel])
            assert WORK_MS * 0.7e6 < linked < waited * 1.01  # some waits are not linked
        assert not times
