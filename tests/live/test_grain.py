"""The agent sends Resources with the configured granularity, which a reload can change."""

import os
import sys

import pytest
from samplers import spawned

from otel_kprofiler.otlp import decode_windows
from tests.agents import Agent

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("sampling_host")]

CONFIG = """
receivers:
  kprofiler:
    samples_per_second: 199
    send_idle_frames: true
    reporter_interval: 300ms
    resource: {{cluster: blue}}
    resources: {resources}
exporters:
  file: {{path: "{path}"}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [file]}}}}
"""
WORK = (sys.executable, "-c", "import os\nwhile True: os.listdir('/proc/self/task')")


@pytest.mark.long
def test_a_reload_changes_how_the_agent_merges_processes(tmp_path):
    path = tmp_path / "profiles.jsonl"

    def groups():
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        windows = decode_windows(whole) if whole else []
        return [
            [dict(group.resource.attributes) for group in window.profiles[0].resources]
            for window in windows
            if window.sample_count
        ]

    program = os.path.realpath(sys.executable)

    def has_program():
        return any(
            program in [resource.get("process.executable.path") for resource in resources]
            for resources in groups()
        )

    by_host = CONFIG.format(resources="host", path=path)
    with spawned(*WORK), spawned(*WORK), Agent(tmp_path, by_host) as agent:
        agent.wait_until(lambda: len(groups()) >= 3)
        for resources in groups():
            (only,) = resources
            assert only["host.name"] == os.uname().nodename
            assert only["cluster"] == "blue"
            assert not [name for name in only if name.startswith(("process.", "container."))]
        agent.configure(CONFIG.format(resources="executable", path=path))
        agent.reload()
        agent.wait_until(has_program)
        last = groups()[-1]
        agent.stop()
    assert len(last) == len({tuple(sorted(one.items())) for one in last})
    assert not [one for one in last if "process.pid" in one]
