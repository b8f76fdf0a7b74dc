"""The agent's own metrics arrive at the same receiver as its profiles."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from otel_kprofiler.agent import agent_config
from otel_kprofiler.agent.cpu_time import CpuTime
from otel_kprofiler.agent.telemetry import Readings, Telemetry
from otel_kprofiler.config import parse_config
from otel_kprofiler.errors import ExportError
from otel_kprofiler.export import ExportOutcome, ExportResult
from otel_kprofiler.model import Account, ExporterAccount, LossCause
from tests.servers import HttpServer, free_port, serve_grpc
from tests.waiting import wait_until

pytestmark = pytest.mark.system

SERVICE = "opentelemetry.proto.collector.metrics.v1.MetricsService"
CONFIG = """
receivers: {{kprofiler: {{resource: {{deployment.environment.name: x}}}}}}
exporters: {{{exporter}, debug: {{}}}}
service:
  telemetry: {{metrics: {{level: {level}, interval: 100ms}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [{name}, debug]}}}}
"""
EXPORTERS = (
    ExporterAccount.of_kinds(
        "otlp_grpc",
        {
            "on_cpu": ExporterAccount(
                "otlp_grpc", 80, {LossCause.REJECTED: 5, LossCause.QUEUE_FULL: 2}, 10
            ),
            "off_cpu": ExporterAccount("otlp_grpc", 8, {LossCause.REJECTED: 1}, 1),
        },
    ),
)
SAMPLED = {
    "on_cpu": Account(100, 97, {LossCause.RING_FULL: 3}, missed=6),
    "off_cpu": Account(12, 10, {LossCause.RING_FULL: 2}),
}
ACCOUNT = Account.of_kinds(SAMPLED, EXPORTERS)


class Receiver:
    def __init__(self):
        self.requests = []
        self.arrived = threading.Event()
        self.server, port = serve_grpc(self.take, service=SERVICE)
        self.endpoint = f"127.0.0.1:{port}"

    def take(self, request, context):
        metadata = dict(context.invocation_metadata())
        self.requests.append((ExportMetricsServiceRequest.FromString(request), metadata))
        self.arrived.set()
        return b""


@pytest.fixture
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.server.stop(0).wait()


@pytest.fixture
def telemetry():
    telemetry = Telemetry(Readings(
        lambda: ACCOUNT, lambda: 7, lambda: {"queue_full": 4}, lambda: CpuTime(1.5, 0.5, 2.0, 0.25),
        lambda: {"stack": 8, "group": 9},
    ))  # fmt: skip
    yield telemetry
    telemetry.close()


def load(endpoint, level="normal", kind="otlp_grpc"):
    tls = "" if kind == "otlp_http" else ", tls: {insecure: true}"
    exporter = f'{kind}: {{endpoint: "{endpoint}", headers: {{key: v}}{tls}}}'
    text = CONFIG.format(exporter=exporter, level=level, name=kind)
    return agent_config(parse_config(text, path="agent.yaml", environ={}).config)


def points(request):
    """Returns the value or count of each series, by name and attributes."""
    results = {}
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in getattr(metric, metric.WhichOneof("data")).data_points:
                    attributes = frozenset(
                        (entry.key, entry.value.string_value) for entry in point.attributes
                    )
                    value = getattr(point, "count", None) or getattr(point, "as_int", None)
                    results[metric.name, attributes] = value or getattr(point, "as_double", 0)
    return results


PROCESSOR = {
    ("otel.component.type", "batching_profile_processor"),
    ("otel.component.name", "batching_profile_processor/otlp_grpc"),
}
EXPORTER = {
    ("otel.component.type", "otlp_grpc_profile_exporter"),
    ("otel.component.name", "otlp_grpc"),
}


def test_metrics_describe_sampling_export_symbolization_and_usage(receiver, telemetry, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "from=environment")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "environment")
    telemetry.configure(load(receiver.endpoint))
    telemetry.on_export("otlp_grpc", ExportResult(ExportOutcome.SUCCESS, {}), 0.1)
    telemetry.on_export("otlp_grpc", ExportResult(ExportOutcome.FAILURE, {}, "", "503"), 9)
    wait_for_requests(receiver, len(receiver.requests) + 2)  # the first request may be older
    request, metadata = receiver.requests[-1]
    result = points(request)

    def value(name, *attributes):
        return result[name, frozenset(set().union(*attributes))]

    def error(kind):
        return {("error.type", kind)}

    on_cpu, off_cpu = ({("kprofiler.sample.kind", kind)} for kind in ("on_cpu", "off_cpu"))
    assert value("kprofiler.sample.taken", on_cpu) == 100
    assert value("kprofiler.sample.taken", off_cpu) == 12
    assert value("kprofiler.sample.lost", on_cpu, error("ring_full")) == 3
    assert value("kprofiler.sample.lost", off_cpu, error("ring_full")) == 2
    assert value("kprofiler.sample.missed", on_cpu) == 6
    assert value("kprofiler.sample.coarse", {("kprofiler.coarse", "stack")}) == 8
    assert value("kprofiler.sample.coarse", {("kprofiler.coarse", "group")}) == 9
    assert value("kprofiler.symbol.record.lost", error("queue_full")) == 4
    size = "otel.sdk.processor.profile_sample.queue.size"
    assert value(size, PROCESSOR, on_cpu) == 10
    assert value(size, PROCESSOR, off_cpu) == 1
    processed = "otel.sdk.processor.profile_sample.processed"
    assert value(processed, PROCESSOR, on_cpu) == 85
    assert value(processed, PROCESSOR, on_cpu, error("queue_full")) == 2
    assert value(processed, PROCESSOR, off_cpu) == 9
    exported = "otel.sdk.exporter.profile_sample.exported"
    assert value(exported, EXPORTER, on_cpu) == 80
    assert value(exported, EXPORTER, on_cpu, error("rejected")) == 5
    assert value(exported, EXPORTER, off_cpu, error("rejected")) == 1
    assert value("otel.sdk.exporter.operation.duration", EXPORTER) == 1
    assert value("otel.sdk.exporter.operation.duration", EXPORTER, error("503")) == 1
    assert value("kprofiler.symbol.reload") == 7
    assert value("process.cpu.time", {("cpu.mode", "user")}) == 1.5
    assert value("process.cpu.time", {("cpu.mode", "system")}) == 0.5
    assert value("kprofiler.cpu.time", {("kprofiler.cpu.part", "children")}) == 2
    assert value("kprofiler.cpu.time", {("kprofiler.cpu.part", "programs")}) == 0.25
    assert value("process.memory.usage") > 10 << 20
    (resource,) = request.resource_metrics
    names = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
    assert names["service.name"] == "otel-kprofiler"
    assert names["deployment.environment.name"] == "x"
    assert metadata["key"] == "v"
    assert "from" not in metadata, "the environment is not read"
    assert os.environ["OTEL_SERVICE_NAME"] == "environment", "and not changed"


def test_metrics_are_sent_over_http(telemetry):
    bodies, arrived = [], threading.Event()

    def answer(request):
        bodies.append((request.path, request.body))
        request.reply()
        arrived.set()

    with HttpServer(answer) as server:
        telemetry.configure(load(server.url, kind="otlp_http"))
        assert arrived.wait(60)
        telemetry.close()
    assert bodies[0][0] == "/v1/metrics"


def test_a_missing_metrics_pipeline_in_the_receiver_is_reported_once(telemetry, caplog):
    server, port = serve_grpc(None)
    telemetry.configure(load(f"127.0.0.1:{port}"))
    wait_until(lambda: "own metrics" in caplog.text)
    time.sleep(0.5)
    telemetry.close()
    server.stop(0).wait()
    (message,) = [text for text in caplog.messages if "own metrics" in text]
    assert "UNIMPLEMENTED" in message
    assert "service.telemetry.metrics.level: none" in message


@pytest.mark.parametrize("kind", ["otlp_grpc", "otlp_http"])
def test_an_unreachable_receiver_and_a_missing_pipeline_log_two_warnings(telemetry, caplog, kind):
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    telemetry.configure(load(endpoint if kind == "otlp_grpc" else f"http://{endpoint}", kind=kind))

    def warnings():
        return [text for text in caplog.messages if "own metrics" in text]

    wait_until(warnings)
    (message,) = warnings()
    assert "pipeline" not in message
    assert "refused" in message
    with contextlib.ExitStack() as stack:
        if kind == "otlp_grpc":
            server, _ = serve_grpc(None, address=endpoint)
            stack.callback(lambda: server.stop(0).wait())
        else:
            stack.enter_context(
                HttpServer(lambda request: request.send_error(404), address=("127.0.0.1", port))
            )
        wait_until(lambda: len(warnings()) > 1)
        telemetry.close()
    assert "add a metrics pipeline to the receiver" in warnings()[1]
    assert len(warnings()) == 2


def test_a_proxy_from_the_environment_is_not_used(receiver, telemetry, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "grpc_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        telemetry.configure(load(receiver.endpoint))
        assert receiver.arrived.wait(60)
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


def sending_threads():
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("kprofiler-metrics")]


def wait_for_requests(receiver, count):
    wait_until(lambda: len(receiver.requests) >= count)


def test_metrics_are_sent_until_they_are_disabled(receiver, telemetry):
    telemetry.configure(load(receiver.endpoint))
    (thread,) = [t for t in threading.enumerate() if t.name == "kprofiler-metrics otlp_grpc"]
    wait_for_requests(receiver, 1)
    telemetry.configure(load(receiver.endpoint))
    wait_for_requests(receiver, len(receiver.requests) + 2)
    assert thread.is_alive(), "unchanged settings do not restart the sender"
    telemetry.configure(load(receiver.endpoint, level="none"))
    wait_until(lambda: not sending_threads())
    count = len(receiver.requests)
    time.sleep(0.3)
    assert len(receiver.requests) == count


def test_metrics_continue_after_a_reload(receiver, telemetry):
    """Otherwise, a receiver that evaluates start times would count samples twice."""

    def describe(request):
        (group,) = request.resource_metrics
        attributes = {entry.key: entry.value.string_value for entry in group.resource.attributes}
        metrics = {metric.name: metric for metric in group.scope_metrics[0].metrics}
        (durations,) = metrics["otel.sdk.exporter.operation.duration"].histogram.data_points
        (reloads,) = metrics["kprofiler.symbol.reload"].sum.data_points
        return attributes, (durations.start_time_unix_nano, reloads.start_time_unix_nano), durations

    config = load(receiver.endpoint)
    telemetry.configure(config)
    telemetry.on_export("otlp_grpc", ExportResult(ExportOutcome.SUCCESS, {}), 0.1)
    wait_for_requests(receiver, 2)
    resource = {**config.resource, "deployment.environment.name": "y"}
    telemetry.configure(replace(config, resource=resource, metrics_interval_s=0.05))
    wait_for_requests(receiver, len(receiver.requests) + 3)
    (before, starts, _), (after, starts_after, durations) = (
        describe(receiver.requests[number][0]) for number in (1, -1)
    )
    assert after == {**before, "deployment.environment.name": "y"}
    assert starts_after == starts
    assert durations.count == 1


def test_metrics_continue_if_their_new_settings_cannot_be_applied(receiver, telemetry, tmp_path):
    config = load(receiver.endpoint)
    telemetry.configure(config)
    (name, exporter) = next(iter(config.exporters.items()))
    tls = replace(exporter.client.tls, insecure=False, ca_file=str(tmp_path / "missing"))
    changed = replace(exporter, client=replace(exporter.client, tls=tls))
    with pytest.raises(ExportError):
        telemetry.configure(replace(config, exporters={name: changed}))
    wait_for_requests(receiver, len(receiver.requests) + 2)


def test_the_sdk_is_not_loaded_if_metrics_are_disabled():
    code = (
        "import sys\n"
        "from types import SimpleNamespace as N\n"
        "from otel_kprofiler.agent.telemetry import Telemetry\n"
        "config = N(exporters={}, resource={}, metrics_interval_s=5, sends_metrics=False)\n"
        "Telemetry(None).configure(config)\n"
        "sys.exit('opentelemetry.sdk' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_agent_that_only_writes_files_sends_no_metrics(telemetry):
    text = CONFIG.format(exporter="file: {path: x}", level="normal", name="file")
    wait_until(lambda: not sending_threads())  # threads from earlier tests have exited
    telemetry.configure(agent_config(parse_config(text, path="agent.yaml", environ={}).config))
    assert not sending_threads()
