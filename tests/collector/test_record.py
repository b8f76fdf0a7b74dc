"""``record --export`` sends a recording directly to a receiver."""

import re
import signal
import subprocess
import time

import pytest

from otel_kprofiler.otlp import read_profiles
from tests.commands import COMMAND, run_command
from tests.further import further

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("sampling_host")]


RECORD = ["record", "-F", "199", "-d", "1h"]


@pytest.mark.parametrize("kind", ["grpc", *further("http")])
def test_a_recording_is_streamed_to_a_collector(collector, samples_of, tmp_path, kind):
    address = collector.http_endpoint if kind == "http" else f"grpc://{collector.grpc_endpoint}"
    command = [*COMMAND, *RECORD, "--idle", "--stacks", "both", "--export", address]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            collector.requests(1)  # ``record`` is sampling
            time.sleep(1)
            running.send_signal(signal.SIGINT)
            _, errors = running.communicate(timeout=120)
        finally:
            running.kill()
    assert running.returncode == 0, errors
    collector.stop()
    last = errors.splitlines()[-1].replace(",", "")
    sent, taken = map(
        int, re.match(rf"sent to {address}: interrupted (\d+) of (\d+) samples ", last).groups()
    )
    lost = int(re.search(r" lost (\d+)", last)[1])  # lost to a full ring
    assert len(samples_of(collector.arrived())) == sent == taken - lost > 0
    assert len(collector.arrived()) > 1


@pytest.mark.long
def test_receivers_are_probed_before_sampling_or_writing_starts(open_collector, tmp_path):
    without_profiles = open_collector(profiles=False)
    collector = open_collector()
    grpc, http = f"grpc://{collector.grpc_endpoint}", collector.http_endpoint
    other = "fix: the receiver speaks the other OTLP protocol: use {}"
    for address, reason, fix in (
        ("grpc://127.0.0.1:1", "Connection refused", "fix: start the receiver"),
        (http.replace("http://", "grpc://"), "UNAVAILABLE", other.format(http)),
        (grpc.replace("grpc://", "http://"), "ConnectionError", other.format(grpc)),
        (f"grpc://{without_profiles.grpc_endpoint}", "UNIMPLEMENTED", "profilesSupport"),
        (without_profiles.http_endpoint, "404", "profilesSupport"),
    ):  # fmt: skip
        started = time.monotonic()
        done = run_command(*RECORD, "-o", "x.html", "--export", address, cwd=tmp_path)
        assert time.monotonic() - started < 30
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: cannot send profiles to {address}: ")
        assert reason in done.stderr
        assert fix in done.stderr
        assert len(done.stderr.splitlines()) == 2, "nothing else is said"
        assert list(tmp_path.iterdir()) == []
    assert collector.output.read_bytes() == b"", "an empty request is not a profile"


@pytest.mark.long
def test_samples_not_accepted_by_a_killed_collector_are_kept(open_collector, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    collector = open_collector()
    command = [*COMMAND, *RECORD, "--idle", "-o", "x.otlp", "--export", collector.http_endpoint]
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    collector.requests(1)
    collector.process.kill()
    collector.process.wait()
    time.sleep(1)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 1
    *_, error, fix = errors.splitlines()
    kept, recorded = (
        sum(window.sample_count for window in read_profiles(str(tmp_path / name)))
        for name in ("x.unsent.otlp", "x.otlp")
    )
    assert 0 < kept < recorded
    assert error.startswith(f"error: {kept:,} of {recorded:,} samples did not reach ")
    assert "[Errno" not in errors
    assert fix == (
        "fix: they are in x.unsent.otlp: wait until the receiver responds again, then"
        f" otel-kprofiler send x.unsent.otlp {collector.http_endpoint}"
    )


def test_an_invalid_address_is_reported_before_sampling():
    done = run_command(*RECORD, "--export", "ftp://h:1")
    assert done.returncode == 2
    assert "ftp://h:1 is not a valid receiver address" in done.stderr
