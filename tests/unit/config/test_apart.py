"""A configuration that is read in another process: same values, same errors, small memory."""

import subprocess
import sys

import pytest

from otel_kprofiler.config import PendingConfig, load_config
from otel_kprofiler.config.apart import to_plain
from otel_kprofiler.errors import ConfigError, KProfilerError

GOOD = """
receivers: {kprofiler: {samples_per_second: 99, pin_cpu_ids: "0-1", reporter_interval: 1m30s}}
exporters:
  otlp_grpc: {endpoint: "127.0.0.1:4317", headers: {authorization: "Bearer x"}}
  debug: {}
service: {pipelines: {profiles: {receivers: [kprofiler], exporters: [otlp_grpc]}}}
"""


def test_the_values_are_those_of_the_schema(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(GOOD)
    config = PendingConfig(str(path)).get()
    assert config.receiver.samples_per_second == 99
    assert config.receiver.cpus == (0, 1)
    assert config.receiver.reporter_interval.seconds == 90
    assert list(config.running_exporters) == ["otlp_grpc"]
    headers = config.exporters["otlp_grpc"].headers
    assert headers["authorization"].get_secret_value() == "Bearer x"
    assert "Bearer" not in repr(config)
    assert config == to_plain(load_config(str(path), environ={}).config)


def test_all_problems_come_back_with_their_places(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(GOOD.replace("99", "0").replace("debug: {}", "debug: {verbos: 1}"))
    with pytest.raises(ConfigError) as caught:
        PendingConfig(str(path)).get()
    assert [problem.line for problem in caught.value.problems] == [2, 5]
    assert caught.value.hint


def test_a_reader_that_dies_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(KProfilerError, match="ended with status 1"):
        PendingConfig("x").get()


def test_the_libraries_do_not_stay_in_the_process(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(GOOD)
    code = (
        "import sys; from otel_kprofiler.config import PendingConfig\n"
        "import otel_kprofiler.agent.agent, otel_kprofiler.cli.run\n"
        f"PendingConfig({str(path)!r}).get()\n"
        "print([m for m in ('pydantic', 'ruamel.yaml', 'grpc', 'requests') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
