"""TLS connections go only to servers with a verified certificate."""

import os
import subprocess
import sys

import pytest

from tests.servers import HttpServer, make_certificate

pytestmark = pytest.mark.system

pytest.importorskip("clickhouse_connect")
REFUSAL = b"Code: 516. DB::Exception: reader: Authentication failed"


@pytest.fixture
def server(tmp_path):
    context = make_certificate(tmp_path)

    def refuse(request):
        server.asked.append(request.headers.get("Authorization"))
        request.reply(403, REFUSAL, X_ClickHouse_Exception_Code="516")

    with HttpServer(refuse, context) as server:
        server.asked = []
        yield server


@pytest.mark.parametrize("is_trusted", [True, False])
def test_the_password_is_sent_only_to_verified_servers(server, tmp_path, is_trusted):
    address = f"clickhouse://reader:s3cret-word@127.0.0.1:{server.port}/otel?secure=true"
    environ = {name: value for name, value in os.environ.items() if "SSL_CERT" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "otel_kprofiler", "report", address],
        capture_output=True, text=True, timeout=120,
        env={**environ, **({"SSL_CERT_FILE": str(tmp_path / "server.pem")} if is_trusted else {})},
    )  # fmt: skip
    assert done.returncode == 1
    assert "s3cret" not in done.stderr
    if is_trusted:
        assert server.asked
        assert "Authentication failed" in done.stderr
        assert "fix: specify the user" in done.stderr
    else:
        assert not server.asked
        assert "CERTIFICATE_VERIFY_FAILED" in done.stderr
        assert "fix: set SSL_CERT_FILE to its CA certificate" in done.stderr
