"""The agent's start, up to its first window."""

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from otel_kprofiler.model import KERNEL_SIDE, Unresolved
from otel_kprofiler.otlp import read_profiles
from tests.agent_account import parse_account
from tests.public import copy_environment, get_public_python

pytestmark = [pytest.mark.live, pytest.mark.timeout(120), pytest.mark.usefixtures("sampling_host")]

RUN = """
import gc, sys
import otel_kprofiler.symbols.kernel.symbolizer as symbolizer
from otel_kprofiler.cli import main
from otel_kprofiler.pipeline import Pipeline

read, step = symbolizer.read_snapshot, Pipeline.step

def report(files, **options):
    print("read", "symbols", file=sys.stderr)
    return read(files, **options)

def report_first(pipeline):
    Pipeline.step = step
    gc.collect()
    kept = sum(type(each) is symbolizer.Snapshot for each in gc.get_objects())
    print("kept", kept, file=sys.stderr)
    step(pipeline)

symbolizer.read_snapshot, Pipeline.step = report, report_first
main()
"""
CONFIG = """
receivers:
  kprofiler: {{samples_per_second: 199, reporter_interval: 60s}}
exporters: {{file: {{path: {path}}}}}
service: {{pipelines: {{profiles: {{receivers: [kprofiler], exporters: [file]}}}}}}
"""


def await_samples(path, agent):
    deadline = time.monotonic() + 60
    while not path.exists() or not path.stat().st_size:
        assert agent.poll() is None, agent.stderr.read()
        assert time.monotonic() < deadline
        os.listdir("/proc/self/task")  # something to sample


def test_at_startup_symbols_are_read_once_and_the_first_window_is_short(tmp_path):
    config, path = tmp_path / "agent.yaml", tmp_path / "profiles.otlp.jsonl"
    config.write_text(CONFIG.format(path=path))
    command = [*get_public_python().words, "-c", RUN, "run", "-c", config]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        await_samples(path, process)
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=60)
    assert process.returncode == 0, log.decode()
    events = [line.split() for line in log.decode().splitlines()]
    events = [words for words in events if words[0] in ("read", "kept")]
    assert events == [["read", "symbols"], ["kept", "1"]]
    account = parse_account(out)
    assert account["gaps"] == []
    first = read_profiles(str(path))[0]
    # Well below the interval, even on a busy machine.
    assert first.end_unix_ns - first.start_unix_ns < 30e9, "short until there is something"
    frames = [
        frame
        for _, sample in first.samples
        for frame in sample.stack.frames
        if frame.side is KERNEL_SIDE
    ]
    assert any(frame.function for frame in frames)
    nameless = {frame.unresolved for frame in frames if not frame.function}
    # The kernel's unwinder may err, and init code started the first CPU's idle task.
    expected = {Unresolved.NO_SYMBOL, Unresolved.UNMAPPED, Unresolved.FREED_INIT}
    if b"BPF symbol records lost" in log:  # other processes load programs
        expected.add(Unresolved.RECORDS_LOST)
    assert nameless <= expected


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a directory of another user")
def test_an_installation_unreadable_to_unprivileged_threads_is_rejected_with_a_fix(tmp_path):
    """A clone in the home directory of a user who runs sudo may be unreadable to these threads."""
    config, path = tmp_path / "agent.yaml", tmp_path / "profiles.otlp.jsonl"
    config.write_text(CONFIG.format(path=path))
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        home = Path(name)
        home.chmod(0o755)
        words = copy_environment(home).words
        os.chown(home, 65534, 65534)
        home.chmod(0o700)
        command = [*words, "-m", "otel_kprofiler", "run", "-c", config]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 3
        error, fix = done.stderr.splitlines()
        assert error.startswith(f"error: {home} is not readable by unprivileged threads")
        subprocess.run(["sh", "-c", fix.removeprefix("fix: ").partition(",")[0]], check=True)
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as agent:
            await_samples(path, agent)
            agent.send_signal(signal.SIGTERM)
            agent.communicate(timeout=60)
        assert agent.returncode == 0
