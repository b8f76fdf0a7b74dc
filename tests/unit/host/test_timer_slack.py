"""The kernel reports increased timer slack only for threads started in the ``with`` block."""

import ctypes

import pytest

from otel_kprofiler.host import coarse_timers
from tests.waiting import call_in_thread

PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30
COARSE_NS, BEFORE_NS = 100_000_000, 70_000


def prctl(option, argument=0):
    return ctypes.CDLL(None).prctl(option, ctypes.c_ulong(argument), 0, 0, 0)


def slack():
    return prctl(PR_GET_TIMERSLACK)


def in_thread(function, slack_ns=BEFORE_NS):
    """Runs a function in a new thread with a given timer slack, and returns the result."""

    def run():
        prctl(PR_SET_TIMERSLACK, slack_ns)
        return function()

    return call_in_thread(run).result()


def inherited():
    return call_in_thread(slack).result()


def test_only_threads_started_inside_coarse_timers_have_increased_timer_slack():
    def measure():
        with coarse_timers():
            inside = inherited()
        return inside, slack(), inherited()

    assert in_thread(measure) == (COARSE_NS, BEFORE_NS, BEFORE_NS)


def test_the_timer_slack_is_restored_after_an_exception():
    def measure():
        with pytest.raises(OSError, match="refused"), coarse_timers():
            raise OSError("refused")
        return slack()

    assert in_thread(measure) == BEFORE_NS


def test_a_timer_slack_already_above_the_requested_value_is_kept():
    def measure():
        with coarse_timers():
            return slack()

    assert in_thread(measure, 2 * COARSE_NS) == 2 * COARSE_NS
