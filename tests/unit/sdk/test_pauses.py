"""A profiler is paused while at least one thread of its process is in a block that pauses it."""

import threading

import pytest

from otel_kprofiler.forks import ProcessLock
from otel_kprofiler.sdk.pauses import Pauses
from tests.raw_forks import check_in_child


class Recording:
    def __init__(self):
        self.calls = []

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")


@pytest.fixture
def session():
    return Recording()


@pytest.fixture
def pauses(session):
    return Pauses(ProcessLock(), lambda: session)


def test_only_the_outermost_block_pauses_and_resumes(pauses, session):
    with pauses.block(), pauses.block():
        assert pauses
    assert not pauses
    assert session.calls == ["pause", "resume"]


def test_a_block_that_raises_resumes(pauses, session):
    with pytest.raises(ValueError, match="service"), pauses.block():
        raise ValueError("service")
    assert session.calls == ["pause", "resume"]


@pytest.mark.system
def test_a_forked_child_keeps_only_the_pauses_of_the_forking_thread(pauses, session):
    entered, leave = threading.Event(), threading.Event()

    def pause():
        with pauses.block():
            entered.set()
            leave.wait()

    other = threading.Thread(target=pause)
    other.start()
    entered.wait()

    def check_other():
        pauses.after_fork_in_child()
        session.calls.clear()
        assert not pauses
        with pauses.block():
            assert session.calls == ["pause"]

    def check_own():
        pauses.after_fork_in_child()
        assert pauses

    check_in_child(check_other)
    with pauses.block():
        check_in_child(check_own)
    leave.set()
    other.join()
    assert not pauses
