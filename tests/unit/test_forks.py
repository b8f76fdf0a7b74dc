"""Fork hooks run in the right order in parent and child."""

import contextlib
import ctypes
import gc
import threading
import time

import pytest

from otel_kprofiler import forks
from otel_kprofiler.forks import ForkAware, ForkStep, ProcessLock
from tests.raw_forks import python_fork, raw_fork, run_in_child

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


def run_in_threads(count, work):
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def register():
    with contextlib.ExitStack() as stack:

        def register(step, member):
            forks.register(step, member)
            stack.callback(forks.unregister, member)

        yield register


@pytest.fixture
def registered(log, register):
    register(ForkStep.RESTART, Recording("restart", log))
    register(ForkStep.RELEASE, Recording("release", log))


def test_hooks_run_in_reverse_order_before_a_fork_and_in_order_after_it(registered, log):
    before = ["before restart", "before release"]
    expected = [*before, "child release", "child restart"]
    assert run_in_child(python_fork, lambda: log) == (str(expected), 0)
    assert log == [*before, "parent release", "parent restart"]


def test_hooks_of_unregistered_or_garbage_collected_objects_are_not_called(log):
    kept, collected = Recording("unregistered", log), Recording("collected", log)
    forks.register(ForkStep.RENEW, kept)
    forks.register(ForkStep.RENEW, collected)
    forks.unregister(kept)
    del collected
    gc.collect()
    assert run_in_child(python_fork, lambda: log) == ("[]", 0)
    assert log == []


def test_a_failing_hook_is_logged_and_the_remaining_hooks_still_run(register, log, caplog):
    class Failing(Recording):
        def after_fork_in_parent(self):
            raise ValueError(self.name)

    register(ForkStep.RELEASE, Failing("failing", log))
    register(ForkStep.RESTART, Recording("other", log))
    assert run_in_child(python_fork, str)[1] == 0
    assert log[-1] == "parent other"
    assert [record.exc_info[0] for record in caplog.records] == [ValueError]


def test_forks_by_two_threads_are_serialized(register):
    """Each thread releases the locks that it acquired."""

    class Locking(ForkAware):
        def __init__(self):
            self.lock = threading.RLock()

        def before_fork(self):
            self.lock.acquire()

        def after_fork_in_parent(self):
            self.lock.release()

    locking = Locking()
    register(ForkStep.RELEASE, locking)

    def fork_often():
        for _ in range(30):
            assert run_in_child(python_fork, str)[1] == 0

    run_in_threads(2, fork_often)
    assert locking.lock.acquire(blocking=False)


IN_CHILD = ["child release", "child restart"]


def test_a_fork_waits_until_an_object_that_opens_descriptors_is_registered(log, register):
    begun = threading.Event()
    register(ForkStep.RENEW, Recording("early", log))
    late = Recording("late", log)

    def start():
        with forks.delay():
            begun.set()
            while not forks._registry._gate._forking:
                time.sleep(0.001)
            register(ForkStep.RELEASE, late)

    starting = threading.Thread(target=start)
    starting.start()
    begun.wait()
    before = ["before early", "before late"]
    in_child = str([*before, "child late", "child early"])
    assert run_in_child(python_fork, lambda: log) == (in_child, 0)
    starting.join()
    assert log == [*before, "parent late", "parent early"]


def test_catch_up_runs_the_fork_hooks_only_once_in_a_child_forked_by_c_code(registered, log):
    def child():
        before = list(log)
        forks.catch_up()
        forks.catch_up()
        return [before, log]

    assert run_in_child(raw_fork, child) == (str([[], IN_CHILD]), 0)
    forks.catch_up()
    assert log == []


@pytest.mark.parametrize("call", [forks.register, lambda _, one: forks.unregister(one)])
def test_hooks_run_when_a_child_forked_in_c_registers_or_unregisters_a_hook(registered, log, call):
    def child():
        call(ForkStep.RENEW, Recording("late", log))
        return log

    assert run_in_child(raw_fork, child) == (str(IN_CHILD), 0)


def test_child_hooks_run_even_if_no_hook_ran_before_the_fork(registered, log):
    """With py-call-osafterfork, uWSGI calls only PyOS_AfterFork_Child."""

    def child():
        ctypes.pythonapi.PyOS_AfterFork_Child()
        forks.catch_up()
        return log

    assert run_in_child(raw_fork, child) == (str(IN_CHILD), 0)


def test_catch_up_does_nothing_if_the_fork_ran_the_hooks(registered, log):
    def child():
        log.clear()
        forks.catch_up()
        return log

    assert run_in_child(python_fork, child) == ("[]", 0)


def test_threads_that_call_catch_up_wait_until_the_hooks_have_run(register, log):
    class Slow(Recording):
        def after_fork_in_child(self):
            threading.Event().wait(0.2)
            forks.catch_up()  # as code called by a hook may do
            super().after_fork_in_child()

    register(ForkStep.RENEW, Slow("slow", log))
    seen = []

    def call():
        forks.catch_up()
        seen.append(list(log))

    def child():
        run_in_threads(4, call)
        return seen

    assert run_in_child(raw_fork, child) == (str([["child slow"]] * 4), 0)


@pytest.mark.parametrize("fork", [raw_fork, python_fork])
def test_a_lock_that_another_thread_held_at_the_fork_is_free_in_the_child(fork):
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
        assert run_in_child(fork, child) == ("free", 0)
    finally:
        done.set()
        holder.join()
