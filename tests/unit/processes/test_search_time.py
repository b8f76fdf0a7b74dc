"""A search ends when it exceeds its time limit."""

import os
import subprocess
import sys

import pytest

from otel_kprofiler.processes import search_time
from otel_kprofiler.processes.search_time import SearchTime, read_run_delay_s
from tests.raising import raising
from tests.waiting import wait_until


class Clocks:
    """Fake clocks for a thread, in seconds."""

    def __init__(self):
        self.now_s = self.cpu_s = self.delay_s = 100.0
        self.time = SearchTime(
            0.2,
            2,
            now_s=lambda: self.now_s,
            cpu_clock_s=lambda: self.cpu_s,
            read_delay_s=lambda: self.delay_s,
        )

    def spend(self, *, cpu_s=0, blocked_s=0, delay_s=0):
        self.now_s += cpu_s + blocked_s + delay_s
        self.cpu_s += cpu_s
        self.delay_s += delay_s
        return self.time.is_over()


def test_a_search_ends_after_using_too_much_cpu_time():
    clocks = Clocks()
    assert [clocks.spend(cpu_s=0.15), clocks.spend(cpu_s=0.1)] == [False, True]


def test_a_search_ends_after_being_blocked_for_too_long():
    clocks = Clocks()
    assert [clocks.spend(blocked_s=1.5), clocks.spend(blocked_s=1)] == [False, True]


def test_the_time_limit_of_a_search_does_not_include_waiting_for_a_cpu():
    clocks = Clocks()
    assert not any(clocks.spend(cpu_s=0.01, delay_s=5) for _ in range(15))
    assert not clocks.spend(blocked_s=1)
    assert clocks.spend(blocked_s=1)


@pytest.mark.system
def test_run_delay_is_measured_per_thread():
    if not os.path.exists("/proc/thread-self/schedstat"):
        pytest.skip("this kernel does not measure run delay (CONFIG_SCHED_INFO)")
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            first_s = read_run_delay_s()
            wait_until(lambda: read_run_delay_s() - first_s >= 0.05)
            other.kill()
    finally:
        os.sched_setaffinity(0, allowed)


def test_the_run_delay_is_zero_if_the_kernel_does_not_report_it(monkeypatch):
    monkeypatch.setattr(search_time, "open", raising(FileNotFoundError()), raising=False)
    assert read_run_delay_s() == 0
