"""When the profiler stops, the log states why each remaining thread has not exited."""

import threading

import pytest

from otel_kprofiler.stopping import join_all, join_and_release, reading, stop_within


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


def test_the_file_system_is_reported_only_for_threads_reading_a_file(release, caplog):
    def work(path):
        if path:
            with reading(path):
                started.release()
                release.wait()
        else:
            started.release()
            release.wait()

    started = threading.Semaphore(0)
    threads = [
        threading.Thread(target=work, args=(path,), name=name, daemon=True)
        for path, name in (("/mnt/frozen/lib.so", "reader"), (None, "worker"))
    ]
    for thread in threads:
        thread.start()
        started.acquire()
    with stop_within(0):
        assert not join_all(threads)
    unread, busy = (record.getMessage() for record in caplog.records)
    assert "cannot read /mnt/frozen/lib.so: the file system is not responding" in unread
    assert "worker" not in unread
    assert "without waiting for worker:" in busy
    assert "file system" not in busy


def test_resources_are_released_after_the_last_thread_has_exited(release):
    released = threading.Event()
    threads = [threading.Thread(target=release.wait, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    with stop_within(0):
        join_and_release([*threads, threading.Thread()], released.set)
    assert not released.is_set()
    release.set()
    assert released.wait(60)
    assert not any(thread.is_alive() for thread in threads)


def test_resources_of_finished_threads_are_released_immediately():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    released = threading.Event()
    join_and_release([thread], released.set)
    assert released.is_set()
