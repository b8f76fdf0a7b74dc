"""A low thread limit causes a two-line error, not a traceback."""

import signal
import subprocess

import pytest

from otel_kprofiler.host import Access, doctor
from otel_kprofiler.model import Level
from tests.agents import parse_account
from tests.further import further
from tests.processes import LoggedProcess
from tests.public import open_directory
from tests.waiting import wait_until

USER = "64123"  # has no other processes that would count towards the limit
CONFIG = """
receivers: {{kprofiler: {{send_idle_frames: true, reporter_interval: 200ms}}}}
exporters: {{file: {{path: "{0}/a.jsonl"}}, file/2: {{path: "{0}/b.jsonl"}}}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [file, file/2]}}}}
"""


@pytest.fixture
def directory():
    with open_directory(0o777) as directory:
        yield directory


@pytest.mark.live
@pytest.mark.parametrize("limit", [1, 4, 8, *further(2, 6, 10)])
def test_a_low_thread_limit_is_reported_or_has_no_effect(limit, directory, public_python):
    if any(finding.level is Level.FAIL for finding in doctor(Access())):
        pytest.skip("this host cannot be sampled")
    config = directory / "agent.yaml"
    config.write_text(CONFIG.format(directory))
    rights = "+bpf,+perfmon,+syslog"
    words = [
        "prlimit", f"--nproc={limit}", "setpriv", f"--reuid={USER}", f"--regid={USER}",
        "--clear-groups", f"--inh-caps={rights}", f"--ambient-caps={rights}",
        public_python.command, "-m", "otel_kprofiler", "run", "-c", str(config),
    ]  # fmt: skip
    samples = directory / "a.jsonl"

    def has_begun():
        has_samples = samples.exists() and samples.stat().st_size
        return has_samples or agent.process.poll() is not None

    with LoggedProcess(words, directory / "log", stdout=subprocess.PIPE) as agent:
        wait_until(has_begun)
        agent.process.send_signal(signal.SIGTERM)
        out, _ = agent.process.communicate(timeout=60)
        said = agent.log
    assert "Traceback" not in said
    if agent.process.returncode:
        assert agent.process.returncode == 1
        assert "does not allow more processes or threads" in said
        assert "fix: raise the limit" in said
    else:
        assert parse_account(out)["gaps"] == []
