"""Fixtures for real agent processes, and for receivers that can be stopped and restarted."""

import contextlib
import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from tests import agents
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
    """A gRPC receiver that can be stopped and restarted at the same address.

    ``answer`` receives the request and context before storage, and may abort the call.
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
    """An HTTP receiver that returns 413 for requests whose decompressed size exceeds its limit."""

    def __init__(self, max_bytes):
        self.payloads, self.max_bytes = [], max_bytes
        self.server = HttpServer(self._answer)
        self.endpoint, self.down = self.server.url, self.server.close

    def _answer(self, request):
        body = gzip.decompress(request.body)
        if len(body) <= self.max_bytes:
            self.payloads.append(body)
        request.reply(200 if len(body) <= self.max_bytes else 413)


class Agent(agents.Agent):
    """A running agent. ``health`` is the ``host:port`` of the agent's health endpoint."""

    def __init__(self, directory, endpoint, *, limits=(), **settings):
        options = {name: settings.pop(name) for name in settings.keys() - SETTINGS.keys()}
        settings = {**SETTINGS, **settings}
        tls = "tls: {insecure: true}" if settings["exporter"] == "otlp_grpc" else ""
        self.health = f"127.0.0.1:{free_port()}"
        text = CONFIG.format(endpoint=endpoint, health=self.health, tls=tls, **settings)
        super().__init__(directory, text, prefix=limits, cwd=REPOSITORY, **options)
        self.wait_until(lambda: self.get("/readyz")[0] == 200)

    def get(self, path):
        return agents.ask_agent(self.health, path)

    def count_pending(self):
        return self.get("/status")[1]["account"]["exporters"]["otlp_grpc"]["pending"]

    def stop(self):
        account = super().stop()
        assert account["gaps"] == []
        return account


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
