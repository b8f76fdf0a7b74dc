"""The agent with a real Collector: every sample taken by the kernel arrives exactly once."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from tests.agent_account import parse_account
from tests.public import get_public_python

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
    config = directory / "agent.yaml"
    config.write_text(CONFIG.format(endpoint=endpoint, own=directory / "own.jsonl"))
    agent = subprocess.Popen(
        [*get_public_python().words, "-m", "otel_kprofiler", "run", "-c", config],
        stdout=subprocess.PIPE,
    )
    own = directory / "own.jsonl"
    deadline = time.monotonic() + 60
    while not own.exists() or not own.stat().st_size:  # until the agent samples and exports
        assert agent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    load = subprocess.Popen(["nice", sys.executable, "-m", "benchmarks.mixed_load", str(seconds)])
    time.sleep(seconds)
    load.wait(120)
    agent.send_signal(signal.SIGTERM)
    out, _ = agent.communicate(timeout=60)
    assert agent.returncode == 0
    return parse_account(out)


def timestamps_in(requests):
    """Counts timestamps, and repetitions on the same CPU, without the package's decoder."""
    seen = Counter()
    for request in requests:
        tables = request["dictionary"]
        strings = tables["stringTable"]
        for resource in request["resourceProfiles"]:
            for scope in resource["scopeProfiles"]:
                for profile in scope["profiles"]:
                    for sample in profile["samples"]:
                        cpu = next(
                            tables["attributeTable"][index]["value"]["intValue"]
                            for index in sample["attributeIndices"]
                            if strings[tables["attributeTable"][index]["keyStrindex"]]
                            == "cpu.logical_number"
                        )
                        for stamp in sample["timestampsUnixNano"]:
                            seen[cpu, stamp] += 1
    return sum(seen.values()), sum(count - 1 for count in seen.values())


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_every_sample_taken_arrives_exactly_once(collector, tmp_path, samples_of):
    account = run_agent(tmp_path, collector.grpc_endpoint, seconds=4)
    collector.stop()
    requests = lines(collector.output)
    arrived, twice = timestamps_in(requests)
    assert account["gaps"] == []
    assert account["taken"] > 4 * 199
    lost = sum(account["lost"].values()) + sum(account["exporters"]["otlp_grpc"]["lost"].values())
    assert arrived == account["exporters"]["otlp_grpc"]["exported"]
    assert arrived + lost == account["taken"]
    assert twice == 0
    assert Counter(samples_of(requests)) == Counter(samples_of(lines(tmp_path / "own.jsonl")))
