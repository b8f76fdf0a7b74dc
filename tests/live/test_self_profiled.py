"""With an agent and an embedded profiler on one host, no CPU time is counted twice."""

import contextlib
import os
import signal
import sys

import pytest
from samplers import spawned

from otel_kprofiler.model import LossCause
from otel_kprofiler.otlp import decode_windows
from tests.agents import Agent
from tests.faults.accounts import check_formulas
from tests.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(300), pytest.mark.usefixtures("sampling_host")]

CONFIG = """
receivers:
  kprofiler:
    samples_per_second: 199
    reporter_interval: 300ms
    self_profiled: {mode}
exporters:
  file: {{path: "{path}"}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [file]}}}}
"""
SERVICE = """
import os, signal, sys
from otel_kprofiler.sdk import KernelProfiler
stopped = []
signal.signal(signal.SIGUSR1, lambda *_: stopped.append(1))
profiler = KernelProfiler.from_env()
profiler.start()
os.nice(10)  # leaves CPU time to the agent
while True:
    os.listdir("/proc/self/task")
    if stopped:
        profiler.stop()
        stopped.clear()
"""
IMPOSTOR = """
import os
from otel_kprofiler.sdk import publish_process_context
publish_process_context({"service.name": "impostor"}, {"otel_kprofiler.target": "self"})
os.nice(10)
while True:
    os.listdir("/proc/self/task")
"""
MARK = "otel_kprofiler.self_profiled"


class Parts:
    """An agent, and the processes that it samples."""

    def __init__(self, stack, directory):
        self._stack, self._directory = stack, directory
        self.path = directory / "agent.jsonl"
        self.own = directory / "service.jsonl"
        self._read = {self.path: (0, []), self.own: (0, [])}

    def start(self, *arguments, **options):
        return self._stack.enter_context(spawned(*arguments, **options))

    def start_service(self):
        env = {
            **os.environ,
            "OTEL_SERVICE_NAME": "shop",
            "OTEL_PROFILES_EXPORTER": "otlp_json_file",
            "OTEL_KPROFILER_FILE": str(self.own),
            "OTEL_KPROFILER_REPORTER_INTERVAL": "300ms",
        }
        return self.start(sys.executable, "-c", SERVICE, env=env)

    def start_agent(self, mode):
        agent = Agent(self._directory, CONFIG.format(mode=mode, path=self.path))
        return self._stack.enter_context(agent)

    def windows(self, path=None):
        """Returns each process's sample count and Resource, keyed by pid, for each window."""
        path = path or self.path
        size, results = self._read[path]
        data = path.read_bytes()[size:] if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = size + len(whole), results
        for window in decode_windows(whole) if whole else []:
            counts = {}
            for resource, sample in window.profiles[0].samples:
                pid = resource.attributes.get("process.pid")
                count = counts.get(pid, (0, resource))[0] + len(sample.timestamps_unix_ns)
                counts[pid] = count, resource
            results.append(counts)
        return results


@pytest.fixture
def parts(tmp_path):
    with contextlib.ExitStack() as stack:
        yield Parts(stack, tmp_path)


@pytest.mark.long
def test_the_agent_does_not_sample_a_service_that_profiles_itself(parts):
    service, impostor = parts.start_service(), parts.start(sys.executable, "-c", IMPOSTOR)
    wait_until(lambda: any(service.pid in window for window in parts.windows(parts.own)))
    agent = parts.start_agent("leave_out")

    def without_service():
        return [
            window
            for window in parts.windows()
            if impostor.pid in window and service.pid not in window
        ]

    wait_until(lambda: len(without_service()) >= 5)
    # The service may appear in early windows, because its context is read at the end of a window.
    assert service.pid not in parts.windows()[-1]
    (_, resource) = parts.windows()[-1].get(impostor.pid, (0, None))
    assert resource is None or MARK not in resource.attributes
    service.send_signal(signal.SIGUSR1)
    _, resource = wait_until(lambda: parts.windows()[-1].get(service.pid))
    assert MARK not in resource.attributes
    account = agent.stop()
    assert account["gaps"] == []
    assert account["kinds"]["on_cpu"]["lost"]["self_profiled"] > 0
    sent = sum(count for window in parts.windows() for count, _ in window.values())
    totals = list(decode_windows(parts.path.read_bytes()))[-1].profiles[0].totals
    assert totals.lost[LossCause.SELF_PROFILED] > 0
    check_formulas(totals, sent)
    assert account["exporters"]["file"]["exported"] == sent
    assert sum(account["lost"].values()) + account["received"] == account["taken"]


@pytest.mark.long
def test_samples_from_self_profiled_services_carry_an_attribute_if_configured(parts):
    service = parts.start_service()
    wait_until(lambda: any(service.pid in window for window in parts.windows(parts.own)))
    agent = parts.start_agent("mark")

    def marked():
        return [
            window[service.pid]
            for window in parts.windows()
            if service.pid in window and window[service.pid][1].attributes.get(MARK) is True
        ]

    wait_until(lambda: len(marked()) >= 2)
    assert marked()[-1][0] > 0
    account = agent.stop()
    assert account["gaps"] == []
    assert "self_profiled" not in account["lost"]
