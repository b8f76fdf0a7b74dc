"""A configuration loads in a child process with the same values and errors, and little memory."""

import os
import subprocess
import sys

import pytest

from otel_kprofiler.agent import agent_config
from otel_kprofiler.config import PendingConfig, load_config
from otel_kprofiler.errors import ConfigError, KProfilerError
from tests.commands import run_python

pytestmark = pytest.mark.system

GOOD = """
receivers: {kprofiler: {samples_per_second: 99, pin_cpu_ids: "0-1", reporter_interval: 1m30s}}
exporters:
  otlp_grpc: {endpoint: "127.0.0.1:4317", headers: {authorization: "Bearer x"}}
  debug: {}
service: {pipelines: {profiles: {receivers: [kprofiler], exporters: [otlp_grpc]}}}
"""


@pytest.fixture(params=[False, True], ids=["spawned", "forked"])
def read(request):
    return lambda path: PendingConfig(str(path), agent_config, fork=request.param).get()


def test_a_config_loaded_in_a_child_process_equals_one_loaded_in_process(tmp_path, read):
    path = tmp_path / "a.yaml"
    path.write_text(GOOD)
    config = read(path)
    assert config.sampler.samples_per_second == 99
    assert config.sampler.pin_cpu_ids == (0, 1)
    assert config.schedule.interval_ns == 90 * 10**9
    assert list(config.exporters) == ["otlp_grpc"]
    assert config.exporters["otlp_grpc"].client.headers == {"authorization": "Bearer x"}
    assert "Bearer" not in repr(config)
    assert config == agent_config(load_config(str(path), environ={}).config)


def test_a_child_prints_no_error_if_the_agent_has_exited(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(GOOD)
    code = (
        "from otel_kprofiler.agent import agent_config\n"
        "from otel_kprofiler.config.load_in_child import main; main(agent_config)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as reader:
        reader.stdout.close()
        assert reader.stderr.read() == b""
    assert reader.returncode == 0


def test_a_reload_rejects_a_file_that_would_block_later_reloads(tmp_path):
    path = tmp_path / "a.yaml"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="cannot be read: not a regular file"):
        PendingConfig(str(path), agent_config)


def test_all_configuration_problems_are_returned_with_their_positions(tmp_path, read):
    path = tmp_path / "a.yaml"
    path.write_text(GOOD.replace("99", "0").replace("debug: {}", "debug: {verbos: 1}"))
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert [problem.line for problem in caught.value.problems] == [2, 5]
    assert caught.value.hint


def test_the_unexpected_death_of_a_child_is_reported_as_an_error(tmp_path, monkeypatch):
    (tmp_path / "x").write_text(GOOD)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(KProfilerError, match="failed: status 1"):
        PendingConfig(str(tmp_path / "x"), agent_config).get()


def test_a_failed_fork_reports_its_cause_and_runs_no_exit_handlers(tmp_path):
    (tmp_path / "x").write_text(GOOD)
    code = (
        "import atexit; from otel_kprofiler.config import PendingConfig\n"
        "atexit.register(print, 'the end of the parent', flush=True)\n"
        "PendingConfig('x', lambda _: 1 / 0, fork=True).get()"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "reading x failed: status 1" in done.stderr
    assert done.stdout == "the end of the parent\n"


@pytest.mark.parametrize("fork", [False, True])
def test_the_parent_does_not_import_the_parsing_libraries(tmp_path, fork):
    path = tmp_path / "a.yaml"
    path.write_text(GOOD)
    code = (
        "import sys; from otel_kprofiler.config import PendingConfig\n"
        "import otel_kprofiler.agent.agent, otel_kprofiler.cli.run\n"
        "from otel_kprofiler.agent import agent_config\n"
        f"PendingConfig({str(path)!r}, agent_config, fork={fork}).get()\n"
        "print([m for m in ('pydantic', 'ruamel.yaml', 'grpc', 'requests') if m in sys.modules])"
    )
    assert run_python(code).strip() == "[]"
