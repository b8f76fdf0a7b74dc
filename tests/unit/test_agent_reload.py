"""The agent rereads its configuration on request, and can sample probabilistically."""

import threading

from otel_kprofiler.agent.reload import ConfigReader, Lottery
from otel_kprofiler.errors import KProfilerError


def wait_for(reader):
    for _ in range(1000):
        outcome = reader.poll()
        if outcome is not None:
            return outcome
        threading.Event().wait(0.005)
    raise AssertionError


def test_reload_requests_during_a_read_cause_one_more_read():
    begun, release, loaded = [], threading.Semaphore(0), iter(["first", "second"])

    def load():
        release.acquire()
        return next(loaded)

    reader = ConfigReader(load, lambda: begun.append(1), lambda: None)
    assert reader.poll() is None
    for _ in range(3):
        reader.request()
        assert reader.poll() is None
    assert len(begun) == 1
    release.release()
    assert wait_for(reader) == "first"
    release.release()
    assert wait_for(reader) == "second"
    assert reader.poll() is None
    assert len(begun) == 2


def test_every_failure_to_reload_the_config_is_returned_as_a_result():
    def load():
        raise next(errors)

    errors = iter([KProfilerError("bad"), ZeroDivisionError()])
    ended = threading.Semaphore(0)
    reader = ConfigReader(load, lambda: None, ended.release)
    for text in ("bad", "ZeroDivisionError"):
        reader.request()
        assert text in str(wait_for(reader))
        assert ended.acquire(timeout=1)


def test_the_probabilistic_threshold_equals_the_fraction_of_sampled_intervals():
    numbers = iter([0.0, 0.29, 0.30, 0.99])
    lottery = Lottery(lambda: next(numbers))
    lottery.set(30, 60)
    assert [lottery.draw(now) for now in (1, 2, 61, 100, 121, 181)] == [
        True, None, True, None, False, False,
    ]  # fmt: skip


def test_only_a_changed_probabilistic_threshold_redraws_the_random_number():
    lottery = Lottery(lambda: 0.5)
    lottery.set(40, 60)
    assert lottery.draw(10) is False
    lottery.set(40, 60)
    assert lottery.draw(11) is None
    lottery.set(60, 60)
    assert lottery.draw(11) is True


def test_all_hosts_sample_by_default():
    assert Lottery(lambda: 0.999).draw(1) is True
