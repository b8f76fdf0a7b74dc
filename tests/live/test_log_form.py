"""The agent's log has one JSON object per line and no secrets, regardless of what libraries log."""

import json

import pytest

from tests.agents import Agent
from tests.commands import run_command
from tests.servers import HttpServer, make_certificate

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("sampling_host")]

CONFIG = """
receivers:
  kprofiler:
    samples_per_second: 99
    send_idle_frames: true
    reporter_interval: 300ms
    verbose_mode: true
exporters:
  otlp_grpc:
    endpoint: "https://localhost:{plain}"
    headers: {{authorization: "Bearer s3cret-1"}}
  otlp_http/unverified:
    endpoint: "https://me:s3cret-2@localhost:{tls}"
    tls: {{insecure_skip_verify: true}}
  otlp_http/proxy:
    endpoint: "https://collector.invalid:4318"
    proxy_url: "http://me:s3cret-3@127.0.0.1:{plain}"
service:
  shutdown_timeout: 2s
  telemetry: {{metrics: {{interval: 500ms}}}}
  pipelines:
    profiles:
      receivers: [kprofiler]
      exporters: [otlp_grpc, otlp_http/unverified, otlp_http/proxy]
"""


WANTED = ("otlp_grpc (localhost", "otlp_http/unverified (", "otlp_http/proxy (", "Insecure",
          "own metrics", "no to Basic [REDACTED]", "WRONG_VERSION_NUMBER")  # fmt: skip


def answer(request):
    """Echoes the request in a response with malformed headers."""
    if request.command == "CONNECT":
        request.send_error(407, f"no to {request.headers['Proxy-Authorization']}")
        return
    text = f"no to {request.headers['Authorization']} at {request.path}".encode()
    request.wfile.write(b"HTTP/1.0 400 Bad\r\nContent-Type: text/plain\r\nbroken\r\n\r\n" + text)
    request.close_connection = True


def test_every_log_line_is_json_without_secrets(tmp_path):
    with (
        HttpServer(answer) as plain,
        HttpServer(answer, make_certificate(tmp_path)) as tls,
        Agent(tmp_path, CONFIG.format(plain=plain.port, tls=tls.port)) as agent,
    ):
        agent.wait_until(lambda: all(text in agent.log for text in WANTED))
        agent.stop()
    text = agent.log
    for line in text.splitlines():
        assert json.loads(line).keys() >= {"time", "level", "logger", "message"}
    assert "ssl_transport_security" not in text
    assert "no to Basic [REDACTED]" in text
    assert "WRONG_VERSION_NUMBER" in text, "the reason comes with the status"
    for secret in ("s3cret", "bWU6czNjcmV0"):
        assert secret not in text


def test_grpc_prints_nothing_during_a_recording(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with HttpServer(answer) as plain:
        address = f"grpcs://localhost:{plain.port}"
        done = run_command("record", "-d", "500ms", "--idle", "--export", address)
    assert done.returncode == 1
    assert "ssl_transport_security" not in done.stderr
    assert "WRONG_VERSION_NUMBER" in done.stderr


@pytest.mark.parametrize(
    "address",
    ["http://me:s3cret@host:port", "me:s3cret@host:4317", "grpc://h:1/?token=s3cret",
     "http://me:s3cret@127.0.0.1:1/x?token=s3cret"],
)  # fmt: skip
def test_recordings_never_show_credentials(address, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    done = run_command("--debug", "record", "-d", "500ms", "--idle", "--export", address)
    assert done.returncode in (1, 2), done.stderr  # an error, not a signal
    assert "s3cret" not in done.stdout + done.stderr
    assert "bWU6czNjcmV0" not in done.stdout + done.stderr
