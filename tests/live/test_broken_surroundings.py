"""Unreadable files, thread limits and closed pipes cause two-line errors, not tracebacks."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from otel_kprofiler.host import Access, doctor
from otel_kprofiler.model import Level
from tests.agent_account import parse_account
from tests.further import further

USER = "64123"  # a user without processes, which would count towards the limit
CONFIG = """
receivers: {{kprofiler: {{send_idle_frames: true, reporter_interval: 200ms}}}}
exporters: {{file: {{path: "{0}/a.jsonl"}}, file/2: {{path: "{0}/b.jsonl"}}}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [file, file/2]}}}}
"""


@pytest.fixture
def open_directory():
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def run(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "otel_kprofiler", *words],
        capture_output=True, text=True, timeout=60, check=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["check", "{}"],
        ["validate", "-c", "{}"],
        ["print-config", "-c", "{}"],
        ["run", "-c", "{}"],
        ["record", "--replay", "{}", "-o", "-.folded"],
        ["symbolize", "main", "--kallsyms", "{}"],
        ["symbolize", "--elf", "{}", "--rva", "0x10"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("kind", ["missing", "directory", "link to itself"])
def test_the_error_for_an_unreadable_file_states_path_and_reason(words, kind, tmp_path):
    path = tmp_path / "file"
    if kind == "directory":
        path.mkdir()
    elif kind != "missing":
        path.symlink_to(path)
    done = run(*(word.format(path) for word in words), cwd=tmp_path)
    assert done.returncode in (1, 2, 3)
    assert str(path) in done.stderr or "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_output_closed_early_causes_no_traceback(tmp_path):
    path = tmp_path / "many"
    path.write_text('{"unknown": 1}\n' * 5000)
    words = [sys.executable, "-m", "otel_kprofiler", "check", str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.live
@pytest.mark.parametrize("limit", [1, 4, 8, *further(2, 6, 10)])
def test_a_low_thread_limit_is_reported_or_has_no_effect(limit, open_directory, public_python):
    directory = open_directory
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
    log = directory / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=file)
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        if (directory / "a.jsonl").exists() and (directory / "a.jsonl").stat().st_size:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    said = log.read_text()
    assert "Traceback" not in said
    if process.returncode:
        assert process.returncode == 3
        assert "does not allow more processes or threads" in said
        assert "fix: raise the limit" in said
    else:
        assert parse_account(out)["gaps"] == []
