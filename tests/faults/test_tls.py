"""TLS failures are reported, and renewed certificate files are used without a restart."""

import contextlib
import os
import random
import shutil
import socket
import ssl
import subprocess
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime

import grpc
import pytest

from otel_kprofiler.export import OtlpGrpcExporter, OtlpHttpExporter, RetryPolicy, Tls
from otel_kprofiler.export.tls_files import parse_validity
from otel_kprofiler.model import Batch, Form, LossCause, ProfileSamples
from tests.servers import HttpServer, serve_grpc

BATCH = Batch(b"x", Form.PROTOBUF, (ProfileSamples("on_cpu", 1),), 0, 1)
LARGE = replace(BATCH, payload=random.Random(1).randbytes(2 << 20))
DAY_S = 86400
AUTHORITY = """
[ca]
default_ca = here
[here]
new_certs_dir = .
database = index
serial = serial
default_md = sha256
policy = any
copy_extensions = copy
unique_subject = no
[any]
commonName = supplied
"""
SIGNING = ("ca", "-config", "authority", "-cert", "ca.pem", "-keyfile", "ca.key")
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """A certificate authority that signs certificates with any validity period."""

    def __init__(self, directory):
        self.directory = directory
        for name, text in {"index": "", "serial": "01", "authority": AUTHORITY}.items():
            (directory / name).write_text(text)
        self.run("req", "-x509", *CURVE, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")

    def run(self, *words):
        subprocess.run(["openssl", *words], cwd=self.directory, check=True, capture_output=True)

    def revoke(self, name):
        self.run(*SIGNING, "-revoke", f"{name}.pem")
        self.run(*SIGNING, "-gencrl", "-crldays", "30", "-out", "ca.crl")

    def sign(self, name, host="localhost", start_s=-DAY_S, end_s=DAY_S):
        start, end = (
            time.strftime("%Y%m%d%H%M%SZ", time.gmtime(time.time() + at)) for at in (start_s, end_s)
        )
        self.run(
            "req", "-new", *CURVE, "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{host}",
            "-keyout", f"{name}.key", "-out", f"{name}.csr",
        )  # fmt: skip
        self.run(
            *SIGNING, "-batch", "-in", f"{name}.csr", "-out", f"{name}.pem", "-startdate", start,
            "-enddate", end, "-notext",
        )  # fmt: skip

    def use(self, name, *, only="key pem"):
        """Replaces the client's key and certificate, or only one of them."""
        for end in only.split():
            shutil.copy(self.directory / f"{name}.{end}", self.directory / f"new.{end}")
            os.rename(self.directory / f"new.{end}", self.directory / f"client.{end}")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    if not shutil.which("openssl"):
        pytest.skip("needs the openssl command to create certificates")
    authority = Authority(tmp_path_factory.mktemp("tls"))
    authority.sign("server")
    authority.sign("expired", start_s=-9000, end_s=-3600)
    authority.sign("early", start_s=3600)
    authority.sign("elsewhere", host="elsewhere.example")
    for name in ("first", "second", "revoked"):
        authority.sign(name)
    authority.revoke("revoked")
    return authority


def server_context(directory, name):
    """Returns the TLS context for a server that requires a client certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / f"{name}.pem", directory / f"{name}.key")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(directory / "ca.pem")
    return context


def open_http(directory, name):
    context, clients = server_context(directory, name), []

    def answer(request):
        subject = dict(part[0] for part in request.connection.getpeercert()["subject"])
        clients.append(subject["commonName"])
        request.reply()

    server = HttpServer(answer, context)
    return server.port, clients, server.close


def open_grpc(directory, name):
    clients = []

    def export(_, context):
        clients.append(context.auth_context()["x509_common_name"][0].decode())
        return b""

    key, certificate, ca = (
        (directory / file).read_bytes() for file in (f"{name}.key", f"{name}.pem", "ca.pem")
    )
    credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
    server, port = serve_grpc(export, credentials=credentials)
    return port, clients, lambda: server.stop(0).wait()


def make_exporter(make, directory, port, elapsed_s=1.5, **options):
    return make(
        f"https://localhost:{port}",
        tls=Tls(
            ca_file=str(directory / "ca.pem"),
            cert_file=str(directory / "client.pem"),
            key_file=str(directory / "client.key"),
        ),
        retry=RetryPolicy(
            initial_interval_s=0.05, max_interval_s=0.2, max_elapsed_time_s=elapsed_s
        ),
        headers={"authorization": "Bearer of-a-secret"},
        timeout_s=5,
        proxy_url="",
        **options,
    )


@pytest.fixture(params=["grpc", "http"])
def connect(request, authority):
    """Returns a function that starts a receiver and returns (exporter, list of clients)."""
    serve = {"grpc": open_grpc, "http": open_http}[request.param]
    ends = []

    def start(name="server", *, elapsed_s=1.5):
        port, clients, close = serve(authority.directory, name)
        make = {"grpc": OtlpGrpcExporter, "http": OtlpHttpExporter}[request.param]
        exporter = make_exporter(make, authority.directory, port, elapsed_s)
        ends.extend([exporter.shutdown, close])
        return exporter, clients

    yield start
    for end in ends:
        end()


@pytest.fixture
def answer_early(authority):
    """Returns a function that starts a TLS server that responds without reading the request."""
    directory = authority.directory
    servers = []

    def serve(answer=b"", *, revoke=False):
        context = server_context(directory, "server")
        context.set_alpn_protocols(["h2", "http/1.1"])
        if revoke:
            context.load_verify_locations(directory / "ca.crl")
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        listener = socket.create_server(("localhost", 0))
        servers.append(listener)

        def run():
            with contextlib.suppress(OSError):  # the listener is closed
                while True:
                    connection, _ = listener.accept()
                    with (
                        connection,
                        contextlib.suppress(OSError),  # the connection is refused
                        context.wrap_socket(connection, server_side=True) as stream,
                    ):
                        stream.sendall(answer)

        threading.Thread(target=run, daemon=True).start()
        return listener.getsockname()[1]

    yield serve
    for listener in servers:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize("make", [OtlpGrpcExporter, OtlpHttpExporter])
def test_the_log_reports_a_revoked_client_certificate(make, authority, answer_early, caplog):
    authority.use("revoked")
    exporter = make_exporter(make, authority.directory, answer_early(revoke=True))
    # the server closes the connection before the request is complete
    result = exporter.export(LARGE)
    assert result.lost == {LossCause.RETRIES_EXHAUSTED: 1}
    assert "the client certificate is revoked" in caplog.text
    exporter.shutdown()


@pytest.mark.parametrize("make", [OtlpGrpcExporter, OtlpHttpExporter])
def test_the_log_reports_an_encrypted_key(make, authority, answer_early, caplog):
    """By default, OpenSSL would ask for the key's password on the terminal."""
    authority.use("first")
    words = ("-aes256", "-passout", "pass:secret", "-out", "client.key")
    authority.run("ec", "-in", "first.key", *words)
    exporter = make_exporter(make, authority.directory, answer_early())
    assert exporter.export(BATCH).lost == {LossCause.RETRIES_EXHAUSTED: 1}
    exporter.shutdown()
    assert "cannot be used together" in caplog.text


def test_an_early_response_to_an_incomplete_request_is_read(authority, answer_early, caplog):
    authority.use("first")
    port = answer_early(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n")
    for _ in range(8):  # the write may fail in several ways or succeed
        exporter = make_exporter(
            OtlpHttpExporter, authority.directory, port, elapsed_s=60, compression="none"
        )
        assert exporter.export(LARGE).lost == {LossCause.TOO_LARGE: 1}
        exporter.shutdown()
    assert "EOF occurred" not in caplog.text


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("expired", "renew the receiver's certificate"),
        ("early", "compare the clocks"),
        ("elsewhere", "set endpoint to a name in the receiver's certificate"),
    ],
)
def test_tls_errors_state_the_cause_and_a_fix_but_no_secrets(connect, authority, name, fix, caplog):
    authority.use("first")
    exporter, clients = connect(name)
    result = exporter.export(BATCH)
    assert result.lost == {LossCause.RETRIES_EXHAUSTED: 1}
    assert clients == []
    assert fix in caplog.text
    assert "of-a-secret" not in caplog.text + result.message


def test_the_log_states_when_the_client_certificate_expired(connect, authority, caplog):
    authority.use("expired")
    exporter, clients = connect()
    assert exporter.export(BATCH).lost == {LossCause.RETRIES_EXHAUSTED: 1}
    der = ssl.PEM_cert_to_DER_cert((authority.directory / "client.pem").read_text())
    _, end = parse_validity(der)
    assert abs((end - datetime.now(UTC)).total_seconds() + 3600) < 600
    text = f"{authority.directory}/client.pem expired on {end:%Y-%m-%d %H:%M} UTC: renew it"
    assert text in caplog.text
    assert text in exporter.find_outage()
    authority.use("first")
    assert exporter.export(BATCH).exported == 1
    assert clients == ["first"]


def test_renewed_tls_files_are_used_once_key_and_certificate_match(connect, authority):
    authority.use("first")
    exporter, clients = connect(elapsed_s=20)
    assert exporter.export(BATCH).exported == 1
    authority.use("second", only="key")
    mend = threading.Timer(0.5, authority.use, ["second"], {"only": "pem"})
    mend.start()
    assert exporter.export(BATCH).exported == 1
    mend.join()
    assert exporter.export(BATCH).exported == 1
    assert clients[-1] == "second"


def test_export_resumes_once_a_missing_key_file_exists(connect, authority, caplog):
    authority.use("first")
    exporter, _ = connect(elapsed_s=20)
    (authority.directory / "client.key").unlink()
    mend = threading.Timer(0.5, authority.use, ["first"], {"only": "key"})
    mend.start()
    assert exporter.export(BATCH).exported == 1
    mend.join()
    assert "Traceback" not in caplog.text
