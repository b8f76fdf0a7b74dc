"""The order of fork hooks in parent and child."""

import gc
import os
import threading
import warnings

import pytest

from otel_kprofiler import forks
from otel_kprofiler.forks import ForkAware, ForkStep


class Told(ForkAware):
    def __init__(self, name, log):
        self.name, self.log = name, log

    def before_fork(self):
        self.log.append(f"before {self.name}")

    def after_fork_in_parent(self):
        self.log.append(f"parent {self.name}")

    def after_fork_in_child(self):
        self.log.append(f"child {self.name}")


@pytest.fixture
def log():
    return []


def fork(log):
    """Fork; returns the logs of parent and child."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        pid = os.fork()
    if not pid:
        os.write(writing, "\n".join(log).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        child = file.read().splitlines()
    assert os.waitpid(pid, 0)[1] == 0
    return log, child


def test_hooks_run_in_order_and_in_reverse_before_the_fork(log):
    restart, release = Told("restart", log), Told("release", log)
    forks.register(ForkStep.RESTART, restart)
    forks.register(ForkStep.RELEASE, release)
    try:
        parent, child = fork(log)
    finally:
        forks.unregister(restart)
        forks.unregister(release)
    assert parent == ["before restart", "before release", "parent release", "parent restart"]
    assert child == ["before restart", "before release", "child release", "child restart"]


def test_unregistered_and_collected_objects_are_not_called(log):
    kept, collected = Told("unregistered", log), Told("collected", log)
    forks.register(ForkStep.RENEW, kept)
    forks.register(ForkStep.RENEW, collected)
    forks.unregister(kept)
    del collected
    gc.collect()
    assert fork(log) == ([], [])


def test_a_failing_hook_is_logged_and_the_others_still_run(log, caplog):
    class Failing(Told):
        def after_fork_in_parent(self):
            raise ValueError(self.name)

    failing, other = Failing("failing", log), Told("other", log)
    forks.register(ForkStep.RELEASE, failing)
    forks.register(ForkStep.RESTART, other)
    try:
        parent, _ = fork(log)
    finally:
        forks.unregister(failing)
        forks.unregister(other)
    assert parent[-1] == "parent other"
    assert [record.exc_info[0] for record in caplog.records] == [ValueError]


def test_forks_of_two_threads_are_serialised(log):
    """Each releases the locks it took."""

    class Locking(ForkAware):
        def __init__(self):
            self.lock = threading.RLock()

        def before_fork(self):
            self.lock.acquire()

        def after_fork_in_parent(self):
            self.lock.release()

    locking = Locking()
    forks.register(ForkStep.RELEASE, locking)

    def fork_often():
        for _ in range(30):
            fork(log)

    threads = [threading.Thread(target=fork_often) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        forks.unregister(locking)
    assert locking.lock.acquire(blocking=False)
