"""Programs with unreadable files, as on unresponsive file systems, do not delay other work."""

import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from otel_kprofiler.otlp import decode_windows
from tests.agents import parse_account
from tests.faults.accounts import Arrived, check_account, check_stream
from tests.fuse import mounted

pytestmark = pytest.mark.live

SHUTDOWN_S = 3.0
GAP_BYTES = 8 << 20
"""The distance from the code to its symbols, which exceeds the kernel's readahead."""
SPINS = """
    __asm__(".pushsection .gap\\n.zero {gap_bytes}\\n.popsection");
    volatile long count;
    __attribute__((noinline)) void spin_in_{name}(void)
    {{
        for (long i = 0; i < 100000; i++)
            count++;
    }}
    int main(void) {{ for (;;) spin_in_{name}(); }}
"""


def compile_spins(directory, name):
    """Compiles a program that can run without its symbols being read into the page cache."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    path = directory / name
    subprocess.run(
        ["gcc", "-O1", "-o", path, "-x", "c", "-"],
        input=SPINS.format(name=name, gap_bytes=GAP_BYTES),
        text=True,
        check=True,
    )
    return path


@contextmanager
def running(*paths, niceness=0):
    """Runs spinning programs during the block."""
    with ExitStack() as undo:
        for path in paths:
            process = undo.enter_context(subprocess.Popen(["nice", f"-n{niceness}", path]))
            undo.callback(process.kill)
        yield


@pytest.fixture
def frozen(tmp_path):
    """Mounts a file system, starts programs from it, then freezes reads past the programs' code."""
    with ExitStack() as undo:

        def start(count=1, *, delay_s=None):
            names = [f"frozen{number}" for number in range(count)]
            content = {name: compile_spins(tmp_path, name).read_bytes() for name in names}
            fuse = undo.enter_context(mounted(tmp_path / "fuse", content))
            fuse.freeze("read", delay_s=delay_s, beyond=GAP_BYTES // 2)
            undo.enter_context(running(*[fuse.point / name for name in names], niceness=10))
            return fuse

        yield start


@pytest.fixture
def healthy(tmp_path):
    with running(compile_spins(tmp_path, "healthy")):
        yield


def count_functions(payloads):
    counts = Counter()
    for payload in payloads:
        for window in decode_windows(payload):
            for profile in window.profiles:
                for _, sample in profile.samples:
                    names = {line.function for frame in sample.stack.frames for line in frame.lines}
                    counts.update(dict.fromkeys(names, len(sample.timestamps_unix_ns)))
    return counts


def find_program_names(payloads):
    return {
        samples.resource.attributes.get("process.executable.name")
        for payload in payloads
        for window in decode_windows(payload)
        for profile in window.profiles
        for samples in profile.resources
    }


def list_waits(agent):
    """Returns the kernel function in which each of the agent's threads is waiting."""
    return [place.read_text() for place in Path(f"/proc/{agent.process.pid}/task").glob("*/wchan")]


def count_waiting(agent):
    """Counts the agent's threads that are waiting for file content."""
    return sum("folio" in function for function in list_waits(agent))


def stop(agent):
    began = time.monotonic()
    agent.process.send_signal(signal.SIGTERM)
    return parse_account(agent.process.stdout.readline()), time.monotonic() - began


@pytest.mark.parametrize(
    "delay_s",
    [pytest.param(None, marks=pytest.mark.long, id="never"), pytest.param(150, id="after 150 s")],
)
def test_frozen_file_systems_do_not_delay_other_symbols(
    run_agent, receiver, frozen, tmp_path, delay_s
):
    """More frozen files than there are reader threads are queued ahead of the healthy file."""
    receiver.up()
    frozen(6, delay_s=delay_s)
    names = [*(f"frozen{number}" for number in range(6)), "healthy"]  # excludes other tests' files
    agent = run_agent(receiver.endpoint, user_symbols="names", comms=names)
    agent.wait_until(
        lambda: count_waiting(agent) and find_program_names(receiver.payloads) >= set(names[:-1]),
        150,
        lambda: (list_waits(agent), find_program_names(receiver.payloads)),
    )
    with running(compile_spins(tmp_path, "healthy")):
        agent.wait_until(lambda: count_functions(receiver.payloads)["spin_in_healthy"] > 20, 50)
    assert agent.get("/livez")[0] == 200


@pytest.mark.long
def test_a_frozen_file_system_does_not_delay_shutdown(run_agent, receiver, frozen, healthy):
    receiver.up()
    frozen()
    agent = run_agent(
        receiver.endpoint, user_symbols="names", more=f"shutdown_timeout: {SHUTDOWN_S:g}s"
    )
    agent.wait_until(lambda: count_waiting(agent))
    agent.wait_until(lambda: count_functions(receiver.payloads)["spin_in_healthy"] > 20)
    account, took_s = stop(agent)
    agent.process.wait(10)
    assert took_s < 2 * SHUTDOWN_S  # with a margin for a busy machine
    got = Arrived(receiver.payloads)
    assert check_account(account, got)["pending"] == 0
    check_stream(got, *got.totals)
    assert agent.process.returncode == 0
    assert agent.log.count("fuse/frozen0") == 1
