"""Fork hooks run in the right order in parent and child."""

import ctypes
import gc
import os
import threading
import warnings

import pytest

from otel_kprofiler import forks
from otel_kprofiler.forks import ForkAware, ForkStep, ProcessLock
from tests.raw_forks import run_in_raw_child

pytestmark = pytest.mark.system


class Recording(ForkAware):
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
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the process has other threads
        pid = os.fork()
    if not pid:
        os.write(writing, "\n".join(log).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        child = file.read().splitlines()
    assert os.waitpid(pid, 0)[1] == 0
    return log, child


def test_hooks_run_in_reverse_order_before_a_fork_and_in_order_after_it(log):
    restart, release = Recording("restart", log), Recording("release", log)
    forks.register(ForkStep.RESTART, restart)
    forks.register(ForkStep.RELEASE, release)
    try:
        parent, child = fork(log)
    finally:
        forks.unregister(restart)
        forks.unregister(release)
    assert parent == ["before restart", "before release", "parent release", "parent restart"]
    assert child == ["before restart", "before release", "child release", "child restart"]


def test_hooks_of_unregistered_and_collected_objects_are_not_called(log):
    kept, collected = Recording("unregistered", log), Recording("collected", log)
    forks.register(ForkStep.RENEW, kept)
    forks.register(ForkStep.RENEW, collected)
    forks.unregister(kept)
    del collected
    gc.collect()
    assert fork(log) == ([], [])


def test_a_failing_hook_is_logged_and_the_others_still_run(log, caplog):
    class Failing(Recording):
        def after_fork_in_parent(self):
            raise ValueError(self.name)

    failing, other = Failing("failing", log), Recording("other", log)
    forks.register(ForkStep.RELEASE, failing)
    forks.register(ForkStep.RESTART, other)
    try:
        parent, _ = fork(log)
    finally:
        forks.unregister(failing)
        forks.unregister(other)
    assert parent[-1] == "parent other"
    assert [record.exc_info[0] for record in caplog.records] == [ValueError]


def test_forks_by_two_threads_are_serialized(log):
    """Each thread releases the locks that it acquired."""

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


@pytest.fixture
def registered(log):
    members = [Recording("restart", log), Recording("release", log)]
    forks.register(ForkStep.RESTART, members[0])
    forks.register(ForkStep.RELEASE, members[1])
    yield
    for member in members:
        forks.unregister(member)


IN_CHILD = ["child release", "child restart"]


def test_catch_up_runs_the_hooks_once_in_a_child_forked_in_c(registered, log):
    def child():
        before = list(log)
        forks.catch_up()
        forks.catch_up()
        return [before, log]

    assert run_in_raw_child(child) == (str([[], IN_CHILD]), 0)
    forks.catch_up()
    assert log == []


@pytest.mark.parametrize("call", [forks.register, lambda _, one: forks.unregister(one)])
def test_registering_or_unregistering_in_a_child_forked_in_c_runs_the_hooks(registered, log, call):
    def child():
        call(ForkStep.RENEW, Recording("late", log))
        return log

    assert run_in_raw_child(child) == (str(IN_CHILD), 0)


def test_child_hooks_run_even_if_no_hook_ran_before_the_fork(registered, log):
    """With py-call-osafterfork, uWSGI calls only PyOS_AfterFork_Child."""

    def child():
        ctypes.pythonapi.PyOS_AfterFork_Child()
        forks.catch_up()
        return log

    assert run_in_raw_child(child) == (str(IN_CHILD), 0)


def test_catch_up_does_nothing_if_the_fork_ran_the_hooks(registered, log):
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        log.clear()
        forks.catch_up()
        os.write(writing, str(log).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        assert file.read() == "[]"
    assert os.waitpid(pid, 0)[1] == 0


def test_threads_that_call_catch_up_wait_until_the_hooks_have_run(log):
    class Slow(Recording):
        def after_fork_in_child(self):
            threading.Event().wait(0.2)
            forks.catch_up()  # as code called by a hook may do
            super().after_fork_in_child()

    slow = Slow("slow", log)
    forks.register(ForkStep.RENEW, slow)
    seen = []

    def call():
        forks.catch_up()
        seen.append(list(log))

    def child():
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seen

    try:
        assert run_in_raw_child(child) == (str([["child slow"]] * 4), 0)
    finally:
        forks.unregister(slow)


@pytest.mark.parametrize("raw", [True, False])
def test_a_lock_that_another_thread_held_at_the_fork_is_free_in_the_child(raw):
    lock, held, done = ProcessLock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()

    def child():
        with lock, lock:
            return "free"

    try:
        if raw:
            assert run_in_raw_child(child) == ("free", 0)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if not pid:
                child()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        done.set()
        holder.join()
