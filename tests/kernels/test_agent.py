"""On this kernel, the agent delivers samples directly and through a Collector, within 60 MB."""

import contextlib
import os
import sys
import time
from pathlib import Path
from statistics import median

import pytest
from guest.modules import spinning

from benchmarks.receiver import Receiver as GrpcReceiver
from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.otlp import check_payload, decode_windows
from tests.agents import Agent
from tests.processes import LoggedProcess
from tests.servers import HttpServer

pytestmark = pytest.mark.kernel

CONFIG = """
receivers:
  kprofiler: {{samples_per_second: 99, reporter_interval: 1s, reporter_jitter: 0}}
exporters:
  otlp_http: {{endpoint: "http://127.0.0.1:{port}", compression: none, timeout: 60s}}
service:
  shutdown_timeout: 300s  # emulated CPUs are slow
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [otlp_http]}}}}
"""
GRPC_CONFIG = """
receivers: {{kprofiler: {{samples_per_second: 99, stacks: both}}}}
exporters: {{otlp_grpc: {{endpoint: "{endpoint}", tls: {{insecure: true}}}}}}
service: {{pipelines: {{profiles: {{receivers: [kprofiler], exporters: [otlp_grpc]}}}}}}
"""
COLLECTOR = Path(os.environ.get("MATRIX_PROGRAMS", "/nonexistent"), "otelcol")
COLLECTOR_PORT = 4318
COLLECTOR_CONFIG = """
receivers: {{otlp: {{protocols: {{http: {{endpoint: "127.0.0.1:{port}"}}}}}}}}
exporters:
  otlp_http: {{endpoint: "http://127.0.0.1:{receiver}", compression: none, timeout: 60s}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [otlp], exporters: [otlp_http]}}}}
"""
WANTED_REQUESTS = 2
PATIENCE_S = 600  # emulated CPUs are slow


@pytest.fixture
def receiver():
    def accept(request):
        server.payloads.append(request.body)
        request.reply(Content_Type="application/x-protobuf")

    with HttpServer(accept) as server:
        server.payloads = []
        yield server


@pytest.mark.one_boot
def test_the_agent_delivers_every_sample(receiver, tmp_path):
    """The agent delivers every sample it takes, and names the test module's functions."""
    deliver_all(receiver, tmp_path, receiver.port)


@pytest.mark.built_programs
@pytest.mark.skipif(not COLLECTOR.exists(), reason="needs go on the host")
def test_every_sample_arrives_through_a_collector(receiver, tmp_path):
    """Every sample that the agent took arrives through an OpenTelemetry Collector."""
    with collector(receiver.port, tmp_path):
        deliver_all(receiver, tmp_path, COLLECTOR_PORT)


@contextlib.contextmanager
def collector(receiver_port, directory):
    config = directory / "collector.yaml"
    config.write_text(COLLECTOR_CONFIG.format(port=COLLECTOR_PORT, receiver=receiver_port))
    command = [COLLECTOR, "--config", config, "--feature-gates=service.profilesSupport"]
    with LoggedProcess(command, directory / "collector.log") as running:
        running.wait_until(lambda: "Everything is ready" in running.log, PATIENCE_S)
        yield
    assert running.process.returncode == 0, running.log


def deliver_all(receiver, directory, port):
    """Runs the agent, and compares its counts with the profiles that arrive at the receiver."""
    text = CONFIG.format(port=port)
    with spinning() as file, Agent(directory, text, python=[sys.executable]) as agent:
        agent.wait_until(lambda: len(receiver.payloads) >= WANTED_REQUESTS, PATIENCE_S)
        account = agent.stop(PATIENCE_S)
    assert account["gaps"] == []
    windows = [window for payload in receiver.payloads for window in decode_windows(payload)]
    delivered = sum(window.sample_count for window in windows)
    assert delivered == account["exporters"]["otlp_http"]["exported"], (account, agent.log)
    # If the host does not schedule an emulated CPU for several seconds, the ring may fill up.
    full = account["lost"].get("ring_full", 0)
    assert delivered == account["taken"] - full > 0, (account, agent.log)
    assert full < 0.1 * account["taken"]
    assert not [v for payload in receiver.payloads for v in check_payload(payload)]
    leaves = {
        (frame.module.build_id, frame.function)
        for window in windows
        for group in window.profiles[0].resources
        for sample in group.samples
        for frame in sample.stack.frames[:1]
        if frame.module and frame.module.name == "kprof_spin"
    }
    assert (file.build_id, "kprof_leaf") in leaves


@pytest.mark.one_boot
def test_the_agent_uses_at_most_60_mb_of_memory_while_it_watches_modules(tmp_path, request):
    """The agent uses at most 60 MB while it exports over gRPC and watches modules."""
    receiver = GrpcReceiver()
    text, readings = GRPC_CONFIG.format(endpoint=receiver.endpoint), []
    with (
        spinning(),
        contextlib.closing(receiver),
        Agent(tmp_path, text, python=[sys.executable]) as agent,
    ):
        # Startup is complete once WANTED_REQUESTS requests have arrived.
        agent.wait_until(lambda: len(receiver.requests) >= WANTED_REQUESTS, PATIENCE_S)
        for _ in range(9):
            time.sleep(1)
            readings.append(read_resident_bytes(agent.pid))
        agent.stop(PATIENCE_S)
    resident = median(readings)  # encoding a request briefly uses more memory
    request.node.user_properties.append(("resident_mb", round(resident / 1e6, 1)))
    assert "pyroute2" not in agent.log
    assert resident <= 60e6
