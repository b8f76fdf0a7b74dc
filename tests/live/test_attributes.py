"""Receivers that reject attributes without a key, as Pyroscope and Parca do, accept ours."""

import gzip
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    ExportProfilesServiceRequest,
)

from otel_kprofiler.host import Access, doctor
from otel_kprofiler.model import Level
from otel_kprofiler.otlp import decode_windows

pytestmark = pytest.mark.live

SERVICE = "opentelemetry.proto.collector.profiles.v1development.ProfilesService"
AGENT = """
receivers:
  kprofiler: {{samples_per_second: 199, send_idle_frames: true, reporter_interval: 500ms}}
exporters:
  otlp_grpc: {{endpoint: "{grpc}", tls: {{insecure: true}}, attributes: {attributes}}}
  otlp_http/proto: {{endpoint: "{http}", attributes: {attributes}}}
  otlp_http/json: {{endpoint: "{http}", encoding: json, attributes: {attributes}}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines:
    profiles: {{receivers: [kprofiler], exporters: [otlp_grpc, otlp_http/proto, otlp_http/json]}}
"""
WORK = """
import os, time
end = time.thread_time() + 2
while time.thread_time() < end:
    os.listdir("/proc/self/task")
"""


@pytest.fixture(autouse=True)
def _host_can():
    missing = [finding for finding in doctor(Access()) if finding.level is Level.FAIL]
    if missing:
        pytest.skip("; ".join(f"{finding.check}: {finding.observed}" for finding in missing))


def find_fault(attributes):
    """Why a strict receiver rejects attributes; empty if it accepts them."""
    for index, attribute in enumerate(attributes):
        if not attribute.get("key"):
            return f"attribute key at index {index} in resource attributes is empty"
        if not set(attribute.get("value", {})) - {"stringValueStrindex"}:
            return f"attribute {attribute['key']} has no value"
    return ""


def find_faults(groups):
    """All reasons to reject ``groups``, which is ``resourceProfiles`` in OTLP JSON."""
    holders = [group["resource"] for group in groups]
    holders += [scope["scope"] for group in groups for scope in group["scopeProfiles"]]
    return [fault for holder in holders if (fault := find_fault(holder.get("attributes", ())))]


def as_json(attributes):
    return [
        {
            "key": attribute.key,
            "value": {attribute.value.WhichOneof("value"): True}
            if attribute.value.WhichOneof("value") not in (None, "string_value_strindex")
            else {},
        }
        for attribute in attributes
    ]


def groups_of(payload):
    """The part of ``resourceProfiles`` that ``find_faults`` checks, from either form."""
    if payload.startswith(b"{"):
        return json.loads(payload)["resourceProfiles"]
    return [
        {
            "resource": {"attributes": as_json(group.resource.attributes)},
            "scopeProfiles": [
                {"scope": {"attributes": as_json(scope.scope.attributes)}}
                for scope in group.scope_profiles
            ],
        }
        for group in ExportProfilesServiceRequest.FromString(payload).resource_profiles
    ]


class StrictReceiver:
    """OTLP over gRPC and HTTP on loopback.

    Attributes:
        accepted: requests, by ``grpc`` or the content type.
        refused: reasons.
    """

    def __init__(self):
        self.accepted, self.refused = {}, []
        options = (("grpc.so_reuseport", 0),)
        self._grpc = grpc.server(futures.ThreadPoolExecutor(2), options=options)
        handler = grpc.unary_unary_rpc_method_handler(self._export)
        self._grpc.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, {"Export": handler})]
        )
        self.grpc = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                kind = self.headers["Content-Type"]
                status = 400 if receiver.take(kind, body) else 200
                self.send_response(status)
                self.send_header("Content-Type", kind)
                answer = b"{}" if kind == "application/json" else b""
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.http = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def take(self, kind, payload):
        faults = find_faults(groups_of(payload))
        self.refused += faults
        if not faults:
            self.accepted.setdefault(kind, []).append(payload)
        return faults

    def _export(self, request, context):
        if faults := self.take("grpc", request):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, faults[0])
        return b""

    def samples(self, kind):
        """Number of accepted samples."""
        return sum(
            window.sample_count
            for payload in self.accepted.get(kind, ())
            for window in decode_windows(payload)
        )

    def close(self):
        self._grpc.stop(0).wait()
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def receiver():
    receiver = StrictReceiver()
    yield receiver
    receiver.close()


KINDS = ("grpc", "application/x-protobuf", "application/json")


def run_agent(receiver, path, attributes):
    """Run the agent until each kind of request has arrived; returns its account."""
    path.write_text(AGENT.format(grpc=receiver.grpc, http=receiver.http, attributes=attributes))
    agent = subprocess.Popen(
        [sys.executable, "-m", "otel_kprofiler", "run", "-c", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(receiver.refused) < 3:
        if receiver.accepted.keys() == set(KINDS):
            break
        time.sleep(0.1)
    agent.send_signal(signal.SIGTERM)
    out, log = agent.communicate(timeout=60)
    assert agent.returncode == 0, log
    return json.loads(out)["exporters"], log.decode()


def test_strict_receivers_accept_the_agents_attributes(receiver, tmp_path):
    exporters, log = run_agent(receiver, tmp_path / "agent.yaml", "inline")
    assert receiver.refused == []
    for name, kind in zip(exporters, KINDS, strict=True):
        assert exporters[name]["exported"] == receiver.samples(kind) > 0, log


def test_strict_receivers_reject_references_and_the_loss_is_counted(receiver, tmp_path):
    exporters, log = run_agent(receiver, tmp_path / "agent.yaml", "references")
    assert receiver.accepted == {}
    assert "attribute key at index 0 in resource attributes is empty" in log
    for account in exporters.values():
        assert account["exported"] == 0
        assert account["lost"].keys() == {"rejected"}


@pytest.mark.parametrize("kind", KINDS)
def test_strict_receivers_accept_attributes_of_recordings_and_services(receiver, kind, tmp_path):
    protocol = "http/json" if kind == "application/json" else "http/protobuf"
    address = f"grpc://{receiver.grpc}" if kind == "grpc" else receiver.http
    env = {**os.environ, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    words = ["-m", "otel_kprofiler", "record", "-d", "1s", "--idle", "--export", address]
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    recorded = receiver.samples(kind)
    assert recorded > 0
    service = tmp_path / "service.py"
    service.write_text(WORK)
    env = {
        **os.environ,
        "OTEL_SERVICE_NAME": "service",
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "OTEL_PROFILES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc" if kind == "grpc" else protocol,
        "OTEL_EXPORTER_OTLP_ENDPOINT": address.replace("grpc://", "http://"),
        "OTEL_KPROFILER_SAMPLES_PER_SECOND": "199",
    }
    command = [os.path.join(os.path.dirname(sys.executable), "opentelemetry-instrument")]
    done = subprocess.run(
        [*command, sys.executable, service], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert receiver.samples(kind) > recorded, done.stderr
    assert receiver.refused == []
