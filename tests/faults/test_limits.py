"""Resource limits: at the CPU limit, the agent's rate drops, and profiles state the new rate."""

import signal
import time

import pytest

from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.otlp import decode_windows
from tests.faults.accounts import check_stream, stop_and_check

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("load")]


@pytest.mark.long
def test_the_sampling_rate_drops_at_the_cpu_limit_and_profiles_contain_periods(run_agent, receiver):
    receiver.up()
    agent = run_agent(receiver.endpoint, rate=4999, more="limits: {max_cpu_percent: 2}")
    agent.wait_until(lambda: agent.get("/status")[1]["samples_per_second"] < 2000, 30)
    agent.wait_until(
        lambda: (
            len({w.profiles[0].period_ns for p in receiver.payloads for w in decode_windows(p)}) > 1
        )
    )
    assert "from 4999 to" in agent.log
    stop_and_check(agent, receiver)
    windows = [w for payload in receiver.payloads for w in decode_windows(payload)]
    periods = [window.profiles[0].period_ns for window in windows]
    assert periods[0] == 10**9 // 4999
    assert periods == sorted(periods)
    for window in windows:
        # On each CPU, samples are at least one period apart, except for timer jitter.
        by_cpu = {}
        for group in window.profiles[0].resources:
            for sample in group.samples:
                by_cpu.setdefault(sample.cpu, []).extend(sample.timestamps_unix_ns)
        for times in by_cpu.values():
            span = window.end_unix_ns - window.start_unix_ns
            assert len(times) <= span / window.profiles[0].period_ns + 2


@pytest.mark.long
def test_memory_usage_remains_within_its_limit_at_the_highest_rate(run_agent, receiver):
    """The agent shrinks its ring buffer and windows. Samples dropped by a full ring are counted."""
    receiver.up()
    agent = run_agent(receiver.endpoint, rate=10_000, more="limits: {max_rss_megabytes: 120}")
    # Memory grows until the exporter has sent the first windows.
    highest, end = 0, time.monotonic() + 5
    while time.monotonic() < end or len(receiver.payloads) < 5:
        assert agent.process.poll() is None
        highest = max(highest, read_resident_bytes(agent.process.pid))
        time.sleep(0.1)
    _, exporter, _ = stop_and_check(agent, receiver)
    assert highest < 120 << 20
    assert exporter["exported"] > 0


STALL = """
import signal, time
from otel_kprofiler.agent import watchdog
watchdog.Watchdog.__init__.__defaults__ = (2.0,)
signal.signal(signal.SIGUSR2, lambda *_: time.sleep(8))  # stalls the main thread
"""


@pytest.mark.long
def test_a_stalled_main_loop_fails_the_liveness_check(run_agent, receiver, tmp_path):
    receiver.up()
    (tmp_path / "sitecustomize.py").write_text(STALL)
    agent = run_agent(receiver.endpoint, environ={"PYTHONPATH": str(tmp_path)})
    # After this wait, the main loop is running and the watchdog is checking it.
    agent.wait_until(lambda: len(receiver.payloads) > 3)
    assert agent.get("/livez")[0] == 200
    agent.process.send_signal(signal.SIGUSR2)
    agent.wait_until(lambda: agent.get("/livez")[0] == 503)
    agent.wait_until(lambda: agent.get("/livez")[0] == 200)
    assert agent.get("/status")[1]["stalls_of_the_loop"] >= 1
    assert "the main loop has stalled for" in agent.log
    before = agent.get("/status")[1]["account"]["received"]
    agent.wait_until(lambda: agent.get("/status")[1]["account"]["received"] > before)
    stop_and_check(agent, receiver)


@pytest.mark.long
def test_a_stopped_process_does_not_count_as_stalled(run_agent, receiver):
    """An agent stopped by SIGSTOP does not respond, but counts the lost samples once resumed."""
    receiver.up()
    agent = run_agent(receiver.endpoint)
    agent.process.send_signal(signal.SIGSTOP)
    try:
        assert agent.get("/livez")[0] == 0, "no answer"
    finally:
        agent.process.send_signal(signal.SIGCONT)
    agent.wait_until(lambda: agent.get("/livez")[0] == 200)
    assert agent.get("/status")[1]["stalls_of_the_loop"] == 0
    before = agent.get("/status")[1]["account"]["received"]
    agent.wait_until(lambda: agent.get("/status")[1]["account"]["received"] > before)
    stop_and_check(agent, receiver)


@pytest.mark.long
def test_shutdown_at_the_highest_rate_completes_within_its_timeout(run_agent, receiver):
    """After a freeze, samples that cannot be processed in time are dropped and reported."""
    receiver.up()
    agent = run_agent(receiver.endpoint, rate=10_000, more="shutdown_timeout: 1s")
    agent.process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    agent.process.send_signal(signal.SIGCONT)
    started = time.monotonic()
    _, exporter, got = stop_and_check(agent, receiver)
    # The limit has a margin for a busy machine.
    assert time.monotonic() - started < 30
    assert exporter["pending"] == 0
    if exporter["exported"]:
        check_stream(got, *got.totals)
