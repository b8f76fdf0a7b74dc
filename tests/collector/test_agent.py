"""Every sample that the kernel takes arrives exactly once at a real Collector."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from tests.agents import Agent

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("sampling_host")]

CONFIG = """
receivers:
  kprofiler:
    samples_per_second: 199
    stacks: both
    send_idle_frames: true
    reporter_interval: 1s
exporters:
  otlp_grpc: {{endpoint: "{endpoint}", tls: {{insecure: true}}}}
  file: {{path: "{own}"}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [otlp_grpc, file]}}}}
"""


def run_agent(directory, endpoint, seconds):
    own = directory / "own.jsonl"
    with Agent(directory, CONFIG.format(endpoint=endpoint, own=own)) as agent:
        agent.wait_until(lambda: own.exists() and own.stat().st_size)  # the agent is sampling
        load = ["nice", sys.executable, "-m", "benchmarks.mixed_load", str(seconds)]
        subprocess.run(load, check=True, timeout=seconds + 120)
        return agent.stop()


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_every_sample_taken_arrives_exactly_once(collector, tmp_path, samples_of):
    account = run_agent(tmp_path, collector.grpc_endpoint, seconds=4)
    collector.stop()
    samples = samples_of(lines(collector.output))
    arrived = len(samples)
    assert account["gaps"] == []
    assert account["taken"] > 4 * 199
    lost = sum(account["lost"].values()) + sum(account["exporters"]["otlp_grpc"]["lost"].values())
    assert arrived == account["exporters"]["otlp_grpc"]["exported"]
    assert arrived + lost == account["taken"]
    places = {(dict(sample[3])["cpu.logical_number"], sample[-1]) for sample in samples}
    assert len(places) == arrived, "each CPU takes one sample at a time"
    assert Counter(samples) == Counter(samples_of(lines(tmp_path / "own.jsonl")))
