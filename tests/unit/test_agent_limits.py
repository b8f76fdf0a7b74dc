"""The agent remains within its limits, and its watchdog detects stalls."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from otel_kprofiler.agent.limits import Governor, Limits, Meter, Usage
from otel_kprofiler.agent.watchdog import Watchdog
from tests.waiting import wait_until

ONE_PERCENT = Limits(cpu=0.01)


def test_the_sampling_rate_falls_until_usage_is_within_the_limit_and_recovers_slowly():
    governor, rate, cost, seen = Governor(), 1000, 0.00004, []
    for _ in range(5):
        rate = governor.decide(Usage(rate * cost, 0), ONE_PERCENT, rate, 1000)
        seen.append(rate)
    assert rate * cost <= ONE_PERCENT.cpu
    assert seen == sorted(seen, reverse=True)
    cost /= 10
    for _ in range(60):
        before, rate = rate, governor.decide(Usage(rate * cost, 0), ONE_PERCENT, rate, 1000)
        assert before <= rate <= before * 1.25 + 1
    assert rate == 1000


def test_a_single_low_measurement_does_not_raise_the_rate():
    governor = Governor()
    usage = [0.005, 0.009, 0.004] * 5
    assert {governor.decide(Usage(cpu, 0), ONE_PERCENT, 100, 1000) for cpu in usage} == {100}


@pytest.mark.parametrize(
    ("usage", "limits", "expected"),
    [
        (Usage(9.0, 10**9), Limits(), 100),
        (Usage(0.0, 200), Limits(rss_bytes=100), 40),
        (Usage(50.0, 0), Limits(cpu=0.01), 25),
        (Usage(0.5, 200), Limits(cpu=1.0, rss_bytes=100), 40),
    ],
    ids=["no limit", "memory", "far above the limit", "the stricter limit decides"],
)
def test_the_rate_is_lowered_only_for_limits_that_are_set(usage, limits, expected):
    assert Governor().decide(usage, limits, 100, 100) == expected


def test_the_sampling_rate_is_at_least_1_hz_and_at_most_the_configured_rate():
    assert Governor().decide(Usage(100.0, 0), ONE_PERCENT, 1, 100) == 1
    assert Governor().decide(Usage(0.0, 0), ONE_PERCENT, 100, 20) == 20


def test_cpu_time_is_measured_between_calls():
    clock, cpu = iter([10.0, 20.0]), iter([1.0, 1.5])
    usage = Meter(lambda: next(cpu), lambda: next(clock)).read()
    assert usage.cpu == pytest.approx(0.05)
    assert usage.rss_bytes > 10**6


class Checks(threading.Event):
    """A stop event for the watchdog: each wait ends when the test permits the next check."""

    def __init__(self):
        super().__init__()
        self.due = threading.Semaphore(0)

    def set(self):
        super().set()
        self.due.release()

    def wait(self, timeout=None):
        self.due.acquire()
        return self.is_set()


@pytest.mark.parametrize(
    "stall", [lambda goes_on: goes_on.wait(60), "count"], ids=["system call", "python"]
)
def test_a_stall_is_logged_with_a_traceback_when_it_starts_and_again_when_it_ends(stall, caplog):
    goes_on, watchdog = threading.Event(), Watchdog()
    watchdog._stop = checks = Checks()

    def count(goes_on):
        while not goes_on.is_set():
            pass

    def observe():
        checks.due.release(20)
        wait_until(watchdog.find_stall)
        wait_until(lambda: "has stalled" in caplog.text)
        goes_on.set()

    observer = threading.Thread(target=observe)
    observer.start()
    with watchdog.watching():
        (count if stall == "count" else stall)(goes_on)
        watchdog.alive()
        assert watchdog.find_stall() == []
        checks.due.release()
        wait_until(lambda: "is running again" in caplog.text)
    observer.join()
    assert watchdog.stalls == 1
    assert "test_agent_limits.py" in caplog.text


@pytest.mark.system
def test_a_process_suspended_by_sigstop_is_not_reported_as_stalled():
    program = """
import sys, threading, time
from otel_kprofiler.agent.watchdog import Watchdog
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
watchdog = Watchdog(after_s=1)
with watchdog.watching():
    print("watched", flush=True)
    while not ended.wait(0.01):
        watchdog.alive()
print(watchdog.stalls)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "watched\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        out, _ = process.communicate(timeout=30)
        assert out == "0\n"
