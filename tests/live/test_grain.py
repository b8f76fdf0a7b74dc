"""The agent sends Resources of the configured grain, which a reload can change."""

import contextlib
import os
import signal
import sys
import time

import pytest
from samplers import spawned

from otel_kprofiler.otlp import decode_windows
from tests.public import get_public_python

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
AGENT = "from otel_kprofiler.cli import main; main()"
WORK = "import os\nwhile True: os.listdir('/proc/self/task')"


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:
        yield lambda *command, **options: stack.enter_context(spawned(*command, **options))


@pytest.mark.long
def test_a_reload_changes_how_the_agent_merges_processes(start, tmp_path):
    path, config = tmp_path / "profiles.jsonl", tmp_path / "agent.yaml"
    config.write_text(CONFIG.format(resources="host", path=path))
    for _ in range(2):
        start(sys.executable, "-c", WORK)
    with open(tmp_path / "agent.log", "wb") as log:
        agent = start(
            *get_public_python().words, "-c", AGENT, "run", "-c", config, stdout=log, stderr=log
        )

    def groups():
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        windows = decode_windows(whole) if whole else []
        return [
            [dict(group.resource.attributes) for group in window.profiles[0].resources]
            for window in windows
            if window.sample_count
        ]

    def wait_for(condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, (tmp_path / "agent.log").read_text()
            assert agent.poll() is None, (tmp_path / "agent.log").read_text()
            time.sleep(0.1)

    wait_for(lambda: len(groups()) >= 3)
    for resources in groups():
        (only,) = resources
        assert only["host.name"] == os.uname().nodename
        assert only["cluster"] == "blue"
        assert not [name for name in only if name.startswith(("process.", "container."))]
    config.write_text(CONFIG.format(resources="executable", path=path))
    agent.send_signal(signal.SIGHUP)
    program = os.path.realpath(sys.executable)
    wait_for(
        lambda: any(
            program in [resource.get("process.executable.path") for resource in resources]
            for resources in groups()
        )
    )
    last = groups()[-1]
    assert len(last) == len({tuple(sorted(one.items())) for one in last})
    assert not [one for one in last if "process.pid" in one]
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 0
