"""TLS to a server: only to one whose certificate is verified, by any means of the system."""

import os
import shutil
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytestmark = pytest.mark.system

pytest.importorskip("clickhouse_connect")
REFUSAL = b"Code: 516. DB::Exception: reader: Authentication failed"


class Handler(BaseHTTPRequestHandler):
    """Refuses every user, and remembers that it was asked."""

    asked: list

    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append(self.headers.get("Authorization"))
        self.send_response(403)
        self.send_header("X-ClickHouse-Exception-Code", "516")
        self.send_header("Content-Length", str(len(REFUSAL)))
        self.end_headers()
        self.wfile.write(REFUSAL)

    do_GET = do_POST  # noqa: N815


@pytest.fixture
def certificate(tmp_path):
    if not shutil.which("openssl"):
        pytest.skip("needs the openssl command to make certificates")
    words = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout key.pem -out server.pem"
    )
    subprocess.run(["openssl", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "server.pem"


@pytest.fixture
def server(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # a client that does not trust the certificate
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_password_is_sent_to_verified_servers_only(server, certificate, is_trusted):
    address = f"clickhouse://reader:s3cret-word@127.0.0.1:{server.server_port}/otel?secure=true"
    environ = {name: value for name, value in os.environ.items() if "SSL_CERT" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "otel_kprofiler", "report", address],
        capture_output=True, text=True, timeout=120,
        env={**environ, **({"SSL_CERT_FILE": str(certificate)} if is_trusted else {})},
    )  # fmt: skip
    assert done.returncode == 1
    assert "s3cret" not in done.stderr
    if is_trusted:
        assert Handler.asked
        assert "Authentication failed" in done.stderr
        assert "fix: name the user" in done.stderr
    else:
        assert not Handler.asked
        assert "CERTIFICATE_VERIFY_FAILED" in done.stderr
        assert "fix: name the file of its CA in SSL_CERT_FILE" in done.stderr
