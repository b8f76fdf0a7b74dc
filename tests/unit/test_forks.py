"""The order in which a fork is told, in parent and child."""

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
    """Fork; the parent's log, and that of the child."""
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


def test_steps_come_in_their_order_and_in_reverse_before_the_fork(log):
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


def test_what_is_unregistered_or_collected_is_not_told(log):
    kept, collected = Told("unregistered", log), Told("collected", log)
    forks.register(ForkStep.RENEW, kept)
    forks.register(ForkStep.RENEW, collected)
    forks.unregister(kept)
    del collected
    gc.collect()
    assert fork(log) == ([], [])


def test_a_hook_that_fails_is_logged_and_keeps_the_others_from_nothing(log, caplog):
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


def test_forks_of_two_threads_take_turns(log):
    """Each gives back the locks that it took itself."""

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
