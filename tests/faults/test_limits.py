"""The agent's limits on a running host: it slows down, and the data says so."""

import pytest

from otel_kprofiler.otlp import decode_windows

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("load")]


def test_the_rate_falls_to_keep_the_cpu_limit_and_every_profile_has_its_own_period(
    run_agent, receiver, arrived
):
    receiver.up()
    agent = run_agent(receiver.endpoint, rate=4999, more="limits: {max_cpu_percent: 2}")
    agent.wait_until(lambda: agent.get("/status")[1]["samples_per_second"] < 2000, 30)
    agent.wait_until(
        lambda: len({w.period_ns for p in receiver.payloads for w in decode_windows(p)}) > 1
    )
    assert "from 4999 to" in agent.log.read_text()
    account = agent.stop()
    got = arrived(receiver.payloads)
    windows = [w for payload in receiver.payloads for w in decode_windows(payload)]
    periods = [window.period_ns for window in windows]
    assert periods[0] == 10**9 // 4999
    assert periods == sorted(periods)
    for window in windows:
        # On each CPU, no two samples are closer than the period allows, but for timer jitter.
        by_cpu = {}
        for group in window.resources:
            for sample in group.samples:
                by_cpu.setdefault(sample.cpu, []).extend(sample.timestamps_unix_ns)
        for times in by_cpu.values():
            span = window.end_unix_ns - window.start_unix_ns
            assert len(times) <= span / window.period_ns + 2
    assert sum(got.samples.values()) == account["exporters"]["otlp_grpc"]["exported"]


def test_a_stalled_loop_is_seen_by_health(run_agent, receiver):
    """SIGSTOP stalls everything; afterwards the loop comes round and nothing is lost unseen."""
    import signal
    import time

    receiver.up()
    agent = run_agent(receiver.endpoint)
    agent.process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    agent.process.send_signal(signal.SIGCONT)
    agent.wait_until(lambda: agent.get("/livez")[0] == 200)
    agent.stop()
