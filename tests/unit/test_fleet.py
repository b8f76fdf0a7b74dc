"""Random window lengths and retry delays keep simulated hosts from sending simultaneously."""

import random
from collections import Counter

import pytest

from otel_kprofiler.config import Receiver
from otel_kprofiler.config.otlp import RetryOnFailure
from otel_kprofiler.pipeline import window_schedule

HOSTS = 500
SECOND_NS = 1_000_000_000


@pytest.fixture(autouse=True)
def _seed():
    random.seed(17)


def count_by_second(times):
    return Counter(int(time) for time in times)


def ends_of_windows(schedule, until_s):
    """Yields the times, in seconds, at which windows end on hosts that all start at time 0."""
    for _ in range(HOSTS):
        now = 0.0
        while now < until_s:
            now += schedule.length_ns(random.random()) / SECOND_NS
            yield now


def test_hosts_started_simultaneously_drift_apart_within_minutes():
    requests = count_by_second(ends_of_windows(window_schedule(Receiver()), 180))
    mean = HOSTS / 5
    assert requests[4] + requests[5] > HOSTS * 0.9
    assert max(requests[second] for second in range(120, 180)) < 1.5 * mean


def test_hosts_stay_synchronized_without_jitter():
    requests = count_by_second(ends_of_windows(window_schedule(Receiver(reporter_jitter=0.0)), 180))
    assert set(requests.values()) == {HOSTS}


@pytest.mark.parametrize("away_s", [10, 60, 600])
def test_hosts_that_fail_at_the_same_time_retry_at_different_times(away_s):
    policy = RetryOnFailure(max_elapsed_time="0s").settings()
    back = []
    for _ in range(HOSTS):
        now, failures = 0.0, 0
        while now < away_s:
            failures += 1
            now += policy.interval_s(failures)
        back.append(now - away_s)
    assert max(back) <= policy.max_interval_s * (1 + policy.randomization_factor)
    assert max(count_by_second(back).values()) < HOSTS / 5
