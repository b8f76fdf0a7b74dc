"""Real agent processes, and receivers that can go down and come back."""

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.agent_account import parse_account
from tests.public import get_public_python
from tests.servers import HttpServer, free_port, serve_grpc

REPOSITORY = Path(__file__).parents[2]

CONFIG = """
receivers:
  kprofiler:
    samples_per_second: {rate}
    self_profiled: mark
    stacks: {stacks}
    send_idle_frames: true
    reporter_interval: {interval}
    user_symbols: {user_symbols}
    monitor_interval: 1s
    target_comms: {comms}
exporters:
  {exporter}:
    endpoint: "{endpoint}"
    {tls}
    timeout: {timeout}
    retry_on_failure: {{initial_interval: 100ms, max_interval: 500ms}}
    sending_queue: {queue}
service:
  telemetry: {{metrics: {{level: none}}}}
  health: {{endpoint: "{health}"}}
  {more}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [{exporter}]}}}}
"""


SETTINGS = {
    "exporter": "otlp_grpc", "timeout": "2s", "queue": "{}", "rate": 199, "stacks": "both",
    "interval": "250ms", "user_symbols": "off", "comms": [], "more": "",
}  # fmt: skip
"""The default values of the settings in ``CONFIG``."""


class Receiver:
    """A gRPC receiver that can go down and come back at the same address.

    ``answer`` is called with request and context before the request is stored, and may abort the
    call.
    """

    def __init__(self):
        self.payloads = []
        self.answer = lambda request, context: b""
        self.max_bytes = 4 << 20
        self.endpoint = f"127.0.0.1:{free_port()}"
        self._server = None

    def _export(self, request, context):
        answer = self.answer(request, context)
        self.payloads.append(request)
        return answer

    def up(self):
        self._server, _ = serve_grpc(self._export, address=self.endpoint, max_bytes=self.max_bytes)

    def down(self):
        if self._server:
            self._server.stop(0).wait()
            self._server = None


class HttpReceiver:
    """An HTTP receiver that responds 413 to requests whose decompressed size exceeds its limit."""

    def __init__(self, max_bytes):
        self.payloads, self.max_bytes = [], max_bytes
        self.server = HttpServer(self._answer)
        self.endpoint, self.down = self.server.url, self.server.close

    def _answer(self, request):
        body = gzip.decompress(request.body)
        if len(body) <= self.max_bytes:
            self.payloads.append(body)
        request.reply(200 if len(body) <= self.max_bytes else 413)


class Agent:
    """A running agent. ``health`` is the ``host:port`` of its health endpoint."""

    def __init__(
        self,
        directory,
        endpoint,
        *,
        limits=(),
        environment=None,
        stdout=subprocess.PIPE,
        stderr=None,
        **settings,
    ):
        assert settings.keys() <= SETTINGS.keys()
        settings = {**SETTINGS, **settings}
        tls = "tls: {insecure: true}" if settings["exporter"] == "otlp_grpc" else ""
        self.health = f"127.0.0.1:{free_port()}"
        self.log = directory / "agent.log"
        self.config = directory / "agent.yaml"
        self.config.write_text(
            CONFIG.format(endpoint=endpoint, health=self.health, tls=tls, **settings)
        )
        command = [*get_public_python().words, "-m", "otel_kprofiler", "run", "-c", self.config]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*limits, *command],
                stdout=stdout,
                stderr=stderr or log,
                cwd=REPOSITORY,
                env={**os.environ, **(environment or {})},
            )
        self.wait_until(lambda: self.get("/readyz")[0] == 200)

    def get(self, path):
        """Returns the health endpoint's status and response, or status 0 if it does not respond."""
        import urllib.error
        import urllib.request

        try:
            with urllib.request.urlopen(f"http://{self.health}{path}", timeout=5) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError:
            return 0, {}

    def count_pending(self):
        return self.get("/status")[1]["account"]["exporters"]["otlp_grpc"]["pending"]

    def wait_until(self, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                pytest.fail(f"the agent:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=90)
        assert self.process.returncode == 0, self.log.read_text()[-3000:]
        account = parse_account(out)
        assert account["gaps"] == []
        return account

    def kill(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def open_receiver():
    receivers = []

    def open_one():
        receivers.append(Receiver())
        return receivers[-1]

    yield open_one
    for receiver in receivers:
        receiver.down()


@pytest.fixture
def receiver(open_receiver):
    return open_receiver()


@pytest.fixture
def limited_receiver():
    receivers = []

    def start(exporter, max_bytes):
        if exporter == "otlp_http":
            receivers.append(HttpReceiver(max_bytes))
            return receivers[-1]
        receivers.append(Receiver())
        receivers[-1].max_bytes = max_bytes
        receivers[-1].up()
        return receivers[-1]

    yield start
    for receiver in receivers:
        receiver.down()


@pytest.fixture
def run_agent(sampling_host, tmp_path):
    agents = []

    def run(endpoint, directory="", **options):
        place = tmp_path / directory
        place.mkdir(exist_ok=True)
        agents.append(Agent(place, endpoint, **options))
        return agents[-1]

    yield run
    for agent in agents:
        with contextlib.suppress(OSError):
            agent.process.kill()
        agent.process.wait()
        if agent.process.stdout:
            agent.process.stdout.close()


@pytest.fixture
def load():
    process = subprocess.Popen(
        ["nice", sys.executable, "-m", "benchmarks.mixed_load", "120"], cwd=REPOSITORY
    )
    yield
    process.kill()
    process.wait()
