"""The retry policy: when to retry, for how long, and when to stop."""

import threading
import time

import pytest

from otel_kprofiler.export import RetryPolicy
from otel_kprofiler.export.retry import Answer, Verdict, attempt_until_settled
from otel_kprofiler.model import LossCause

RETRY = Answer(Verdict.RETRY, "UNAVAILABLE")
DONE = Answer(Verdict.ACCEPTED, "OK")


class Clock:
    """A fake clock that advances only during waits and attempts."""

    def __init__(self):
        self.now = 0.0
        self.waits = []

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds
        return False

    def is_set(self):
        return False


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def run(clock, answers, policy, attempt_s=0.0, timeout_s=10.0):
    allowances = []
    script = iter(answers)

    def attempt(allowance):
        allowances.append(allowance)
        clock.now += min(attempt_s, allowance)
        return next(script)

    outcome = attempt_until_settled(attempt, policy=policy, timeout_s=timeout_s, stop=clock)
    return outcome, allowances


def test_backoff_grows_by_the_multiplier_up_to_the_maximum(clock):
    assert run(clock, [RETRY] * 5 + [DONE], RetryPolicy(True, 1, 2, 0, 5, 0))[0] == (DONE, None)
    assert clock.waits == [1, 2, 4, 5, 5]


def test_jitter_spreads_backoff_over_its_whole_range():
    policy = RetryPolicy(initial_interval_s=10, randomization_factor=0.5)
    waits = [policy.interval_s(1) for _ in range(2000)]
    assert 5 <= min(waits) < 5.5
    assert 14.5 < max(waits) <= 15
    assert 9.5 < sum(waits) / len(waits) < 10.5


def test_the_backoff_does_not_overflow_after_a_thousand_failures():
    assert RetryPolicy(randomization_factor=0).interval_s(10_000) == 30


def test_backoff_is_at_least_the_receivers_retry_delay(clock):
    policy = RetryPolicy(True, 4, 1, 0, 30, 0)
    answers = [RETRY._replace(delay_s=delay) for delay in (0, 9, 1e12)]
    run(clock, [*answers, DONE], policy)
    assert clock.waits == [4, 9, 300]


def test_total_retry_time_is_bounded(clock):
    policy = RetryPolicy(True, 1, 1, 0, 1, 10)
    outcome, allowances = run(clock, [RETRY] * 99, policy, attempt_s=3, timeout_s=5)
    assert outcome == (RETRY, LossCause.RETRIES_EXHAUSTED)
    assert allowances == [5, 5, 2]
    assert clock.now == 10


@pytest.mark.parametrize("initial_interval_s", [1, 20])
def test_no_request_is_sent_until_a_throttling_receivers_delay_is_over(clock, initial_interval_s):
    answer = RETRY._replace(delay_s=60)
    policy = RetryPolicy(initial_interval_s=initial_interval_s, max_elapsed_time_s=10)
    outcome, allowances = run(clock, [answer] * 9, policy)
    assert outcome == (answer, LossCause.RETRIES_EXHAUSTED)
    assert (len(allowances), clock.now) == (1, 10)


def test_only_one_attempt_is_made_if_retries_are_disabled(clock):
    outcome, allowances = run(clock, [RETRY, DONE], RetryPolicy(enabled=False))
    assert outcome == (RETRY, LossCause.RETRIES_EXHAUSTED)
    assert len(allowances) == 1


def test_a_permanent_error_ends_retries(clock):
    refused = Answer(Verdict.REFUSED, "INVALID_ARGUMENT", delay_s=1)
    assert run(clock, [RETRY, refused], RetryPolicy())[0] == (refused, LossCause.REJECTED)


def test_samples_are_counted_as_lost_to_shutdown_if_an_attempt_fails_during_shutdown():
    stop = threading.Event()
    stop.set()
    outcome = attempt_until_settled(
        lambda _: RETRY, policy=RetryPolicy(enabled=False), timeout_s=1, stop=stop
    )
    assert outcome == (RETRY, LossCause.SHUTDOWN)


@pytest.mark.parametrize("requested", [None, 0.3])
def test_a_wait_can_be_ended_once_unless_the_receiver_requested_it(requested):
    hurry, began, answers = threading.Event(), time.monotonic(), []

    def attempt(_):
        answers.append(time.monotonic() - began)
        if len(answers) == 1:
            hurry.set()
            return RETRY._replace(delay_s=requested)
        return Answer(Verdict.ACCEPTED, "OK")

    interval_s = 600 if requested is None else 0.01
    policy = RetryPolicy(
        initial_interval_s=interval_s, max_interval_s=interval_s, max_elapsed_time_s=0
    )
    attempt_until_settled(attempt, policy=policy, timeout_s=1, stop=threading.Event(), hurry=hurry)
    assert len(answers) == 2
    assert answers[1] - answers[0] >= (requested or 0)
