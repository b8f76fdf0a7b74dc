"""Settings for the OTLP/gRPC exporter are validated, and retry delays are parsed."""

import contextlib
import socket
import subprocess
import sys
import threading

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo

from otel_kprofiler.errors import ExportError
from otel_kprofiler.export import OtlpGrpcExporter, RetryPolicy, Tls
from otel_kprofiler.export.grpc import parse_endpoint
from otel_kprofiler.export.grpc_status import parse_retry_delay
from otel_kprofiler.model import LossCause

pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    ("messages", "delay"),
    [
        ([RetryInfo(retry_delay=Duration(seconds=2, nanos=500_000_000))], 2.5),
        ([ErrorInfo(), RetryInfo(retry_delay=Duration(seconds=-5))], 0.0),
        ([RetryInfo()], 0.0),
        ([ErrorInfo()], None),
        ([], None),
    ],
)
def test_retry_info_is_parsed(status_details, messages, delay):
    assert parse_retry_delay(status_details(*messages)) == delay


@pytest.mark.parametrize(
    ("endpoint", "insecure", "target", "secure"),
    [
        ("collector:4317", False, "collector:4317", True),
        ("collector:4317", True, "collector:4317", False),
        ("collector", True, "collector:4317", False),
        ("http://collector:4317/", False, "collector:4317", False),
        ("http://collector", False, "collector:4317", False),
        ("https://collector", True, "collector", True),
        ("https://[::1]:4317", True, "[::1]:4317", True),
        ("unix:///run/otel.sock", True, "unix:///run/otel.sock", False),
        ("unix:/run/otel.sock", True, "unix:/run/otel.sock", False),
        ("dns:///collector:4317", False, "dns:///collector:4317", True),
    ],
)
def test_endpoint_urls_are_parsed(endpoint, insecure, target, secure):
    assert parse_endpoint(endpoint, insecure=insecure) == (target, secure)


@pytest.mark.parametrize(
    ("endpoint", "arguments"),
    [
        ("", {}),
        ("http://", {}),
        ("http://host/path", {}),
        ("host:port", {}),
        ("http://user:secret@host:1", {}),
        ("host:1?token=secret", {}),
        ("https://user:1/secret@host", {}),
        ("https://localhost", {"headers": {"bad name": "x"}}),
        ("https://localhost", {"headers": {"name": "secret\n"}}),
        ("https://localhost", {"compression": "zstd"}),
        ("https://localhost", {"tls": Tls(ca_file="/nonexistent/ca.pem")}),
        ("https://localhost", {"tls": Tls(cert_file="/etc/hostname")}),
    ],
)
def test_invalid_settings_are_rejected_with_a_hint_and_without_secrets(endpoint, arguments):
    with pytest.raises(ExportError) as caught:
        OtlpGrpcExporter(endpoint, **arguments)
    assert caught.value.hint
    assert "secret" not in caught.value.message


@pytest.fixture
def proxy():
    """Starts a proxy that closes each connection, and yields the proxy's address and requests."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = server.accept()
                    with peer:
                        asked.append(peer.recv(65536))

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", asked
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("given", [True, False])
def test_only_a_configured_proxy_is_used(proxy, given, monkeypatch, batch, caplog):
    """A proxy from the environment could read the metadata of plain-text requests."""
    address, asked = proxy
    url = f"http://me:hunter22@{address}"
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    if not given:
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, url)
    once = RetryPolicy(enabled=False)
    exporter = OtlpGrpcExporter(
        "http://collector.invalid:4317", proxy_url=url if given else "", retry=once, timeout_s=20
    )
    assert exporter.export(batch()).lost == {LossCause.RETRIES_EXHAUSTED: 3}
    exporter.shutdown()
    assert bool(asked) is given
    if given:
        assert asked[0].startswith(b"CONNECT collector.invalid:4317 ")
        assert b"Proxy-Authorization: Basic " in asked[0]
    assert "hunter22" not in caplog.text


def test_importing_the_package_does_not_load_a_transport_library():
    """A profiler that only writes files must not load gRPC and requests (27 MB)."""
    script = (
        "import sys, otel_kprofiler.export as e\n"
        "heavy = {'grpc', 'requests', 'urllib3', 'google.protobuf', 'opentelemetry'}\n"
        "print(heavy & sys.modules.keys())"
    )
    assert subprocess.check_output([sys.executable, "-c", script]) == b"set()\n"
