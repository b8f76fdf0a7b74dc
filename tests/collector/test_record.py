"""``record --export``: a recording sent directly to a receiver."""

import json
import subprocess
import sys

import pytest

from otel_kprofiler.host import Access, doctor
from otel_kprofiler.model import Level

pytestmark = pytest.mark.live


@pytest.fixture(autouse=True)
def _host_can():
    missing = [finding for finding in doctor(Access()) if finding.level is Level.FAIL]
    if missing:
        pytest.skip("; ".join(f"{finding.check}: {finding.observed}" for finding in missing))


def record(*words):
    return subprocess.run(
        [sys.executable, "-m", "otel_kprofiler", "record", "-d", "2s", "-F", "199", *words],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_a_recording_streams_to_a_collector(collector, samples_of, tmp_path, kind):
    address = collector.http_endpoint if kind == "http" else f"grpc://{collector.grpc_endpoint}"
    done = record("--idle", "--stacks", "both", "--export", address)
    assert done.returncode == 0, done.stderr
    collector.stop()
    requests = [json.loads(line) for line in collector.output.read_bytes().splitlines()]
    count = len(samples_of(requests))
    assert count > 300
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"sent to {address}: {count:,} of {count:,} samples, ")
    assert last.endswith("lost 0")
    assert len(requests) > 1, "not all at the end"


def test_an_unreachable_receiver_fails_with_a_reason(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    done = record("--idle", "--export", "grpc://127.0.0.1:1")
    assert done.returncode == 1
    assert "error: no sample arrived at grpc://127.0.0.1:1: retries_exhausted" in done.stderr
    assert "fix: " in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--raw", "x", "-o", "x", "-f", "html"], "are the same file"),
        (["--export", "ftp://h:1"], "no receiver's address"),
    ],
)
def test_invalid_arguments_are_reported_before_sampling(words, message):
    done = record(*words)
    assert done.returncode == 2
    assert message in done.stderr
