"""Tests the agent's startup, up to its first window."""

import contextlib
import os
import resource
import subprocess
import tempfile
from pathlib import Path

import pytest
from samplers import IN_KERNEL, load

from otel_kprofiler.model import KERNEL_SIDE, Unresolved
from otel_kprofiler.otlp import read_profiles
from tests.agents import Agent
from tests.public import copy_environment

pytestmark = [pytest.mark.live, pytest.mark.timeout(120), pytest.mark.usefixtures("sampling_host")]

RUN = """
import gc, sys
import otel_kprofiler.symbols.kernel.symbolizer as symbolizer
from otel_kprofiler.cli import main
from otel_kprofiler.pipeline import Pipeline

read, step = symbolizer.read_snapshot, Pipeline.step

def report(files, **options):
    sys.stderr.write("read symbols\\n")
    return read(files, **options)

def report_first(pipeline):
    Pipeline.step = step
    gc.collect()
    kept = sum(type(each) is symbolizer.Snapshot for each in gc.get_objects())
    sys.stderr.write(f"kept {kept}\\n")  # whole, because other threads log
    step(pipeline)

symbolizer.read_snapshot, Pipeline.step = report, report_first
main()
"""
# Samples only the kernel, so that a first window of a single sample has kernel frames.
CONFIG = """
receivers:
  kprofiler: {{samples_per_second: 199, reporter_interval: 60s, stacks: kernel}}
exporters: {{file: {{path: {path}}}}}
service: {{pipelines: {{profiles: {{receivers: [kprofiler], exporters: [file]}}}}}}
"""


def await_samples(path, agent):
    with load(IN_KERNEL):
        agent.wait_until(lambda: path.exists() and path.stat().st_size)


def test_symbols_are_read_once_at_startup_and_the_first_window_is_short(tmp_path):
    path = tmp_path / "profiles.otlp.jsonl"
    with Agent(tmp_path, CONFIG.format(path=path), words=("-c", RUN)) as agent:
        await_samples(path, agent)
        account = agent.stop()
    events = [line.split() for line in agent.log.splitlines()]
    events = [words for words in events if words[0] in ("read", "kept")]
    assert events == [["read", "symbols"], ["kept", "1"]]
    assert account["gaps"] == []
    first = read_profiles(str(path))[0]
    # 30 s is well below the interval, but enough even on a busy machine.
    assert first.end_unix_ns - first.start_unix_ns < 30e9, "short until there is something"
    frames = [
        frame
        for _, sample in first.samples
        for frame in sample.stack.frames
        if frame.side is KERNEL_SIDE
    ]
    assert any(frame.function for frame in frames)
    nameless = {frame.unresolved for frame in frames if not frame.function}
    # The kernel's unwinder may return wrong addresses, and init code started CPU 0's idle task.
    expected = {Unresolved.NO_SYMBOL, Unresolved.UNMAPPED, Unresolved.FREED_INIT}
    if "BPF symbol records were lost" in agent.log:  # other processes may have loaded programs
        expected.add(Unresolved.RECORDS_LOST)
    assert nameless <= expected


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a directory of another user")
def test_an_installation_that_unprivileged_threads_cannot_read_is_rejected_with_a_hint(tmp_path):
    """A clone in a sudo user's home directory may be unreadable to the unprivileged threads."""
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
        with Agent(tmp_path, CONFIG.format(path=path), python=words) as agent:
            await_samples(path, agent)
            agent.stop()


class AgentWithPipe(Agent):
    """An agent that reads its first configuration from a FIFO, and thus waits for it."""

    def configure(self, configuration):
        os.mkfifo(self.config)

    def open_config(self):
        """Returns the writing end of the FIFO, once the agent is reading."""
        ends = []

        def has_reader():
            with contextlib.suppress(OSError):
                ends.append(os.open(self.config, os.O_WRONLY | os.O_NONBLOCK))
            return bool(ends)

        self.wait_until(has_reader)
        return os.fdopen(ends[0], "w")


def test_a_reload_that_is_requested_during_startup_takes_effect_afterwards(tmp_path):
    configuration = CONFIG.format(path=tmp_path / "profiles.otlp.jsonl")
    with AgentWithPipe(tmp_path, "") as agent:
        with agent.open_config() as file:
            agent.reload()
            Agent.configure(agent, configuration)
            file.write(configuration)
        agent.wait_for_line("configuration reloaded")
        agent.stop()


def test_the_agent_raises_its_soft_limit_on_open_files(tmp_path):
    configuration = CONFIG.format(path=tmp_path / "profiles.otlp.jsonl")
    with Agent(tmp_path, configuration, prefix=("prlimit", "--nofile=64:4096")) as agent:
        agent.wait_until_it_samples()
        assert resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE) == (4096, 4096)
        agent.stop()
