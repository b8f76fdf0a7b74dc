"""Hanging reads do not delay other reads."""

import os
import threading
import time

import pytest

from otel_kprofiler.host import PatientCalls
from otel_kprofiler.stopping import join_all, stop_within
from tests.raising import raising
from tests.waiting import wait_until

pytestmark = pytest.mark.system

HERE, THERE = 1, 2


@pytest.fixture
def calls():
    calls = PatientCalls("kprofiler-test", patience_s=0.1)
    yield calls
    assert join_all(calls.stop())


def test_a_call_returns_when_its_function_returns(calls):
    read = []
    assert calls.call(HERE, lambda: read.append(threading.current_thread().name))
    assert read == ["kprofiler-test"]


def test_the_caller_waits_while_the_function_is_consuming_cpu_time(calls):
    read = []

    def compute():
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
        read.append(1)

    assert calls.call(HERE, compute)
    assert read == [1]


def test_a_failing_function_does_not_affect_other_functions(calls, caplog):
    assert calls.call(HERE, lambda: 1 // 0)
    assert "ZeroDivisionError" in caplog.text
    assert calls.call(HERE, lambda: None)


@pytest.mark.parametrize("kind", ["lookup", "open", "read"])
def test_an_unresponsive_device_does_not_delay_calls_on_other_devices(fuse, tmp_path, calls, kind):
    read = []
    if kind != "lookup":
        os.stat(fuse.point / "file")
    fuse.freeze(kind)

    def read_file():
        with open(fuse.point / "file", "rb") as file:
            read.append(file.read())

    assert not calls.call(THERE, read_file)
    assert calls.has_left(THERE)
    assert calls.call(HERE, lambda: read.append(b"other"))
    assert not calls.call(THERE, lambda: read.append(b"later"))
    assert read == [b"other"]
    fuse.thaw()
    wait_until(lambda: not calls.has_left(THERE))
    assert read == [b"other", b"content", b"later"]
    assert calls.call(THERE, lambda: None)


def test_a_call_that_progresses_slowly_is_not_abandoned(fuse):
    fuse.freeze("open", delay_s=0.25)
    read = []

    def read_often():
        for _ in range(28):
            with open(fuse.point / "file", "rb"):
                pass
        read.append(1)

    calls = PatientCalls("kprofiler-test", patience_s=3.2)  # the running call is checked twice
    assert calls.call(THERE, read_often)
    assert read == [1]
    assert join_all(calls.stop())


def test_threads_abandoned_in_hanging_calls_are_reported(fuse):
    left, threads = [], []
    fuse.freeze("open")

    def read_file():
        threads.append(threading.get_ident())
        (fuse.point / "file").read_bytes()

    calls = PatientCalls("kprofiler-test", patience_s=0.1, on_left=left.append)
    assert not calls.call(THERE, read_file)
    assert left == threads
    fuse.thaw()
    assert join_all(calls.stop())


def test_a_hang_is_attributed_to_the_device_that_the_callback_names(fuse, calls):
    fuse.freeze("open")
    assert not calls.call(HERE, (fuse.point / "file").read_bytes, lambda: "elsewhere")
    assert calls.has_left("elsewhere")
    assert not calls.has_left(HERE)
    assert calls.call(HERE, lambda: None)
    fuse.thaw()


def test_functions_run_in_the_calling_thread_if_no_thread_can_start(calls, monkeypatch, caplog):
    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    called = []
    assert calls.call(HERE, lambda: called.append(threading.current_thread()))
    assert called == [threading.current_thread()]
    assert "can't start new thread" in caplog.text


def test_functions_run_in_the_calling_thread_after_shutdown():
    calls = PatientCalls("kprofiler-test")
    assert join_all(calls.stop())
    called = []
    assert calls.call(HERE, lambda: called.append(threading.current_thread()))
    assert called == [threading.current_thread()]


def test_stopping_abandons_hanging_calls_at_the_deadline(fuse, calls):
    fuse.freeze("open")
    assert not calls.call(THERE, (fuse.point / "file").read_bytes)
    began = time.monotonic()
    with stop_within(0.5):
        assert not join_all(calls.stop())
    assert time.monotonic() - began < 30
    fuse.thaw()


def test_functions_that_wait_for_a_hanging_device_are_called_even_after_stopping(fuse, calls):
    """Only the function may know how to close the file that it was to read."""
    fuse.freeze("open")
    called = []
    assert not calls.call(THERE, (fuse.point / "file").read_bytes)
    assert not calls.call(THERE, lambda: called.append(True))
    threads = calls.stop()
    fuse.thaw()
    assert join_all(threads)
    assert called
