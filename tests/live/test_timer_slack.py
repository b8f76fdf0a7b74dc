"""gRPC's threads have increased timer slack in the agent and commands, but not in services."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.agents import Agent
from tests.needs import ROOT
from tests.public import get_public_python

pytestmark = [pytest.mark.live, pytest.mark.timeout(120), ROOT]

COARSE_NS, DEFAULT_NS = 100_000_000, 50_000
POLLING = "event_engine"
"""The name of gRPC's polling threads."""
GRPC = {POLLING, "grpc_global_tim", "lifeguard"}
CONFIG = """
receivers: {{kprofiler: {{stacks: kernel}}}}
exporters: {{otlp_grpc: {{endpoint: "{endpoint}", tls: {{insecure: true}}}}}}
service: {{pipelines: {{profiles: {{receivers: [kprofiler], exporters: [otlp_grpc]}}}}}}
"""
HOLD = """
import sys
print("open", flush=True)
sys.stdin.read()
exporter.shutdown(0)
"""


def slacks(process, last):
    """Returns the timer slack of each thread in a process, in nanoseconds, by thread name.

    Waits until a thread's name starts with ``last`` and no thread still has its creator's name.
    """
    while True:
        assert process.poll() is None
        threads = {}
        for tid in os.listdir(f"/proc/{process.pid}/task"):
            try:
                name = Path(f"/proc/{tid}/comm").read_text().strip()
                # This file exists in /proc/TID for each thread, but not in /proc/PID/task/TID.
                slack = int(Path(f"/proc/{tid}/timerslack_ns").read_text())
            except (FileNotFoundError, ProcessLookupError):
                continue
            threads.setdefault(name, []).append(slack)
        main = Path(f"/proc/{process.pid}/comm").read_text().strip()
        if len(threads[main]) == 1 and any(name.startswith(last) for name in threads):
            return {name: set(values) for name, values in threads.items()}
        time.sleep(0.05)


def assert_only_grpc_is_coarse(threads):
    assert POLLING in threads
    assert {name for name, slack in threads.items() if COARSE_NS in slack} == GRPC & set(threads)
    assert all(slack in ({COARSE_NS}, {DEFAULT_NS}) for slack in threads.values()), threads


def hold(script):
    process = subprocess.Popen(
        [*get_public_python().words, "-c", script + HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "open\n"
    threads = slacks(process, POLLING)
    process.communicate(timeout=60)
    assert process.returncode == 0
    return threads


@pytest.mark.usefixtures("sampling_host")
def test_only_the_agents_grpc_threads_have_increased_timer_slack(tmp_path, receiver):
    with Agent(tmp_path, CONFIG.format(endpoint=receiver.grpc)) as agent:
        # The thread that sends metrics starts last.
        threads = slacks(agent.process, "OtelPeriodic")
        agent.stop()
    assert_only_grpc_is_coarse(threads)
    assert any(name.startswith("kprofiler-") for name in threads)


def test_grpc_threads_of_record_and_send_have_increased_timer_slack(receiver):
    threads = hold(f"""
from otel_kprofiler.cli.receivers import open_receiver
exporter = open_receiver("grpc://{receiver.grpc}")
""")
    assert_only_grpc_is_coarse(threads)


def test_the_timer_slack_of_service_threads_is_unchanged(receiver):
    threads = hold(f"""
from otel_kprofiler.sdk import OtlpGrpcExporter
exporter = OtlpGrpcExporter("http://{receiver.grpc}")
""")
    assert POLLING in threads
    assert set.union(*threads.values()) == {DEFAULT_NS}
