"""OTLP over gRPC, tested with a real gRPC server that sends scripted responses."""

import logging
import socket
import threading
import time

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo

from otel_kprofiler.export import (
    ExportOutcome,
    OtlpGrpcExporter,
    OtlpHttpExporter,
    RetryPolicy,
    Tls,
)
from otel_kprofiler.model import LossCause
from tests.commands import run_python
from tests.servers import forward, free_port
from tests.unit.export.answers import partial_success as partial
from tests.unit.export.answers import refuse, start_export

pytestmark = pytest.mark.system

SUCCESS = ExportOutcome.SUCCESS
RETRYABLE = {
    *("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS")
}
ERRORS = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
GATE = "--feature-gates=service.profilesSupport"


@pytest.fixture
def exporter(grpc_receiver, quick):
    exporter = OtlpGrpcExporter(f"http://{grpc_receiver.endpoint}", retry=quick)
    yield exporter
    exporter.shutdown()


def test_requests_follow_the_specification(grpc_receiver, batch):
    endpoint = f"http://{grpc_receiver.endpoint}"
    exporter = OtlpGrpcExporter(endpoint, headers={"Authorization": "Bearer x"})
    payload = bytes(range(256)) * 100  # not a protobuf message
    assert exporter.export(batch(payload)) == (SUCCESS, {"on_cpu": (3, {})}, "", "")
    exporter.shutdown()
    ((request, metadata),) = grpc_receiver.requests
    assert request == payload
    assert metadata["authorization"] == "Bearer x"
    assert metadata["user-agent"].startswith("otel-kprofiler/")
    assert " OTel-OTLP-Exporter-Python/" in metadata["user-agent"]


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, "1"),
        ({"development_version": "2"}, "2"),
        ({"development_version": ""}, None),
        ({"headers": {"OTLP-Profiles-Development-Version": "3"}}, "3"),
    ],
)
def test_the_schema_version_is_sent_once(grpc_receiver, http_receiver, batch, options, sent):
    for exporter in (
        OtlpGrpcExporter(f"http://{grpc_receiver.endpoint}", **options),
        OtlpHttpExporter(http_receiver.endpoint, proxy_url="", **options),
    ):
        assert exporter.export(batch()).outcome is SUCCESS
        exporter.shutdown()
    ((_, metadata),) = grpc_receiver.requests
    ((_, headers, _),) = http_receiver.requests
    name = "otlp-profiles-development-version"
    assert (metadata.get(name), headers.get_all(name)) == (sent, [sent] if sent else None)


@pytest.mark.parametrize("code", ERRORS, ids=lambda code: code.name)
def test_only_retryable_codes_are_retried(grpc_receiver, exporter, batch, code):
    grpc_receiver.answer(refuse(code), b"")
    result = exporter.export(batch())
    if code.name in RETRYABLE:
        assert result == (SUCCESS, {"on_cpu": (3, {})}, "", "")
        first, second = (request for request, _ in grpc_receiver.requests)
        assert first == second, "profiles keep their ids, which show that they were sent twice"
    else:
        assert result.outcome is ExportOutcome.FAILURE
        assert (result.lost, result.error_type) == ({LossCause.REJECTED: 3}, code.name)
        assert len(grpc_receiver.requests) == 1


def test_resource_exhausted_is_retried_only_with_retry_info(
    grpc_receiver, exporter, batch, status_details
):
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    info = RetryInfo(retry_delay=Duration(nanos=300_000_000))
    grpc_receiver.answer(
        refuse(exhausted, details=status_details(ErrorInfo(reason="busy"), info)), b""
    )
    started = time.monotonic()
    assert exporter.export(batch()).outcome is SUCCESS
    assert time.monotonic() - started >= 0.3
    grpc_receiver.script.clear()
    for details in (status_details(), status_details(ErrorInfo()), b"\xff\xff", None):
        grpc_receiver.script.clear()
        grpc_receiver.answer(refuse(exhausted, details=details))
        assert exporter.export(batch()).lost == {LossCause.REJECTED: 3}
    assert len(grpc_receiver.requests) == 2 + 4


@pytest.mark.parametrize(
    ("answer", "arrived"),
    [
        (b"", 111),
        (partial(), 111),
        (partial(message="only a warning"), 111),
        (partial(-1), 111),
        (partial(1, "too old"), 11),
        (partial(2, "too old"), 1),
        (partial(3, "all"), 0),
        (partial(4, "more than there were"), 0),
    ],
)
def test_partly_accepted_requests_are_not_resent(grpc_receiver, exporter, batch, answer, arrived):
    """The largest profiles are counted as rejected, so that "exported" is a lower bound."""
    grpc_receiver.answer(answer)
    result = exporter.export(batch(samples=(10, 100, 1)))
    assert (result.outcome, result.exported) == (SUCCESS, arrived)
    assert result.lost == ({LossCause.REJECTED: 111 - arrived} if arrived < 111 else {})
    assert len(grpc_receiver.requests) == 1


@pytest.mark.parametrize("response", [b"\xff\xff\xff", b"\x12" + b"\x00" * (4 << 20)])
def test_a_success_status_counts_as_delivery_regardless_of_the_response(
    grpc_receiver, exporter, batch, response, caplog
):
    """A response that is unreadable or larger than 4 MiB is logged once per exporter."""
    grpc_receiver.answer(response, b"", response)
    for _ in range(3):
        result = exporter.export(batch())
        assert (result.outcome, result.exported, result.lost) == (SUCCESS, 3, {})
    assert len(grpc_receiver.requests) == 3
    (record,) = caplog.records
    assert "its response is unreadable" in record.message


def test_an_unimplemented_error_names_the_feature_gate_once(grpc_receiver, exporter, batch, caplog):
    grpc_receiver.answer(refuse(grpc.StatusCode.UNIMPLEMENTED))
    for _ in range(3):
        assert GATE in exporter.export(batch()).message
    assert [GATE in record.message for record in caplog.records] == [True]
    assert "profiles pipeline" in caplog.text
    assert len(grpc_receiver.requests) == 3


def test_the_start_and_the_end_of_an_outage_are_logged(grpc_receiver, exporter, batch, caplog):
    caplog.set_level(logging.INFO)
    unavailable = refuse(grpc.StatusCode.UNAVAILABLE)
    grpc_receiver.answer(unavailable, unavailable, unavailable, b"")
    exporter.export(batch())
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_receivers_message_cannot_forge_log_lines(grpc_receiver, exporter, batch, caplog):
    grpc_receiver.answer(partial(1, "a\nERROR forged \x1b[31m" + "x" * 100_000))
    exporter.export(batch())
    assert "\n" not in caplog.messages[0]
    assert "\x1b" not in caplog.messages[0]
    assert len(caplog.messages[0]) < 1000


def test_a_batch_above_the_limit_is_not_sent(grpc_receiver, batch):
    exporter = OtlpGrpcExporter(f"http://{grpc_receiver.endpoint}", max_bytes=100)
    assert exporter.export(batch(b"x" * 100)).outcome is SUCCESS
    assert exporter.export(batch(b"x" * 101)).lost == {LossCause.TOO_LARGE: 3}
    assert len(grpc_receiver.requests) == 1
    exporter.shutdown()


def test_the_default_size_limit_is_below_that_of_grpc_servers(batch):
    """gRPC servers accept 4 MiB by default."""
    assert OtlpGrpcExporter("http://localhost").max_bytes < 4 << 20


@pytest.mark.parametrize(("compression", "small"), [("gzip", True), ("none", False)])
def test_requests_are_compressed_on_the_wire(grpc_receiver, batch, compression, small):
    payload = b"kernel stack " * 20_000
    with Forwarder(grpc_receiver.port) as forwarder:
        exporter = OtlpGrpcExporter(f"http://127.0.0.1:{forwarder.port}", compression=compression)
        assert exporter.export(batch(payload)).outcome is SUCCESS
        exporter.shutdown()
    assert grpc_receiver.requests[0][0] == payload
    assert (forwarder.bytes < len(payload) / 10) is small


@pytest.mark.usefixtures("fast_clock")
def test_refused_connections_are_retried_until_the_time_limit(batch):
    port = free_port()
    policy = RetryPolicy(initial_interval_s=0.05, max_elapsed_time_s=40)
    exporter = OtlpGrpcExporter(f"http://127.0.0.1:{port}", retry=policy)
    result = exporter.export(batch())
    assert (result.lost, result.error_type) == ({LossCause.RETRIES_EXHAUSTED: 3}, "UNAVAILABLE")
    exporter.shutdown()


def test_the_exporter_reconnects_to_a_restarted_receiver(grpc_receiver, batch):
    """gRPC's default reconnect back-off grows to two minutes."""
    with Forwarder(grpc_receiver.port) as forwarder:
        policy = RetryPolicy(initial_interval_s=0.2, max_interval_s=0.2, max_elapsed_time_s=60)
        exporter = OtlpGrpcExporter(f"http://127.0.0.1:{forwarder.port}", retry=policy)
        forwarder.refuse(3)
        started = time.monotonic()
        assert exporter.export(batch()).outcome is SUCCESS
        assert time.monotonic() - started < 3 + 30
        exporter.shutdown()


def test_an_export_to_a_hanging_receiver_ends_after_the_timeout(grpc_receiver, batch):
    done = threading.Event()
    grpc_receiver.answer(lambda *_: done.wait(60) and b"")
    policy = RetryPolicy(enabled=False)
    exporter = OtlpGrpcExporter(f"http://{grpc_receiver.endpoint}", timeout_s=0.2, retry=policy)
    result = exporter.export(batch())
    done.set()
    assert result.lost == {LossCause.RETRIES_EXHAUSTED: 3}
    assert result.error_type == "DEADLINE_EXCEEDED"
    exporter.shutdown()


@pytest.mark.parametrize("is_refused", [True, False])
def test_shutdown_interrupts_backoffs_and_attempts(grpc_receiver, batch, is_refused):
    done, unavailable = threading.Event(), refuse(grpc.StatusCode.UNAVAILABLE)
    grpc_receiver.answer(unavailable if is_refused else lambda *_: done.wait(60) and b"")
    policy = RetryPolicy(initial_interval_s=60, max_elapsed_time_s=0)
    exporter = OtlpGrpcExporter(f"http://{grpc_receiver.endpoint}", timeout_s=60, retry=policy)
    result = start_export(exporter, batch(), grpc_receiver)
    assert not exporter.force_flush(10)
    started = time.monotonic()
    exporter.shutdown(100)
    assert result.result().lost == {LossCause.SHUTDOWN: 3}
    assert time.monotonic() - started < 30
    done.set()
    exporter.shutdown()
    assert exporter.export(batch()).lost == {LossCause.SHUTDOWN: 3}


def test_shutdown_waits_for_a_running_export_attempt(grpc_receiver, exporter, batch):
    grpc_receiver.answer(lambda *_: time.sleep(0.3) or b"")
    result = start_export(exporter, batch(), grpc_receiver)
    exporter.shutdown(60_000)
    assert result.result().exported == 3


CLIENT = {"cert_file": "client.pem", "key_file": "client.key"}


@pytest.mark.parametrize(
    ("mutual", "scheme", "settings", "delivered"),
    [
        (False, "https://", {"ca_file": "ca.pem"}, True),
        (False, "https://", {"ca_file": "ca.pem", "insecure": True}, True),
        (False, "https://", {"ca_file": "stranger.pem"}, False),
        (False, "https://", {}, False),
        (False, "https://", {"insecure_skip_verify": True}, True),
        # An endpoint without a scheme uses TLS unless insecure is set.
        (True, "", {"ca_file": "ca.pem", **CLIENT}, True),
        (True, "", {"ca_file": "ca.pem"}, False),
    ],
)
def test_tls_verifies_the_receiver_and_authenticates_the_client(
    *, certificates, open_grpc_receiver, batch, mutual, scheme, settings, delivered, monkeypatch
):
    monkeypatch.chdir(certificates)
    key, certificate, ca = (
        (certificates / name).read_bytes() for name in ("server.key", "server.pem", "ca.pem")
    )
    credentials = grpc.ssl_server_credentials(
        [(key, certificate)], ca if mutual else None, require_client_auth=mutual
    )
    with open_grpc_receiver(credentials) as receiver:
        endpoint, once = f"{scheme}{receiver.endpoint}", RetryPolicy(enabled=False)
        exporter = OtlpGrpcExporter(endpoint, tls=Tls(**settings), retry=once)
        assert (exporter.export(batch()).outcome is SUCCESS) is delivered
        exporter.shutdown()


@pytest.mark.parametrize(("trusted", "delivered"), [("ca.pem", True), ("stranger.pem", False)])
def test_the_system_decides_which_authorities_are_trusted(
    *, certificates, open_grpc_receiver, batch, trusted, delivered, monkeypatch
):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / trusted))
    key, certificate = ((certificates / f"server.{kind}").read_bytes() for kind in ("key", "pem"))
    with open_grpc_receiver(grpc.ssl_server_credentials([(key, certificate)])) as receiver:
        retry = RetryPolicy(enabled=False)
        exporter = OtlpGrpcExporter(f"https://{receiver.endpoint}", retry=retry)
        assert (exporter.export(batch()).outcome is SUCCESS) is delivered
        exporter.shutdown()


EXPORT_DURING_IMPORT = """
import sys, threading
from importlib.abc import MetaPathFinder
from otel_kprofiler.export.sender import _instrumentation_suppressed

loading, go_on = threading.Event(), threading.Event()

class Slow(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "opentelemetry.context.context":  # imported by opentelemetry.context
            loading.set()
            go_on.wait(10)

sys.meta_path.insert(0, Slow())
threading.Thread(target=lambda: __import__("opentelemetry.context")).start()
assert loading.wait(10)
threading.Timer(0.2, go_on.set).start()
with _instrumentation_suppressed():
    from opentelemetry import context
    print(context.get_value(context._SUPPRESS_INSTRUMENTATION_KEY))
"""


def test_an_export_waits_for_a_concurrent_import_of_the_opentelemetry_api():
    assert run_python(EXPORT_DURING_IMPORT) == "True\n"


def test_instrumentation_is_suppressed_while_exporting(grpc_receiver, exporter, batch, monkeypatch):
    from opentelemetry import context

    key = context._SUPPRESS_INSTRUMENTATION_KEY
    seen = []
    attempt = exporter._attempt
    monkeypatch.setattr(
        exporter, "_attempt", lambda *a: seen.append(context.get_value(key)) or attempt(*a)
    )
    exporter.export(batch())
    assert (seen, context.get_value(key)) == ([True], None)


class Forwarder:
    """Forwards connections to a port, counts the bytes from clients, and can stop responding."""

    def __init__(self, port):
        self.target = port
        self.bytes = 0
        self.dead_until = 0.0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def refuse(self, seconds):
        self.dead_until = time.monotonic() + seconds

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            if time.monotonic() < self.dead_until:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self.target))
            counted = (client, server, self.count)
            threading.Thread(target=self.pump, args=counted, daemon=True).start()
            threading.Thread(target=self.pump, args=(server, client), daemon=True).start()

    def count(self, size):
        self.bytes += size

    @staticmethod
    def pump(source, sink, *count):
        with source:
            forward(source, sink, *count)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
