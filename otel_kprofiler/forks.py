"""Runs fork hooks in a defined order.

A forked child has a single thread and shares its parent's kernel objects. An object that must react
to a fork registers its hooks, and specifies the step in which they run.

If C code calls ``fork()``, Python does not run the hooks in the child; :func:`catch_up` runs them
instead. uWSGI calls :func:`catch_up` in its workers. Outside uWSGI, each function that may be a
service's first call into this package calls :func:`catch_up` before taking a lock, joining a thread
or using the parent's memory.
"""

import concurrent.futures.thread  # noqa: F401 - its hook frees a lock before ours
import contextlib
import enum
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from otel_kprofiler.workers import call_in_workers

_MAX_WAIT_S: Final = 1.0
"""Maximum time, in seconds, for which an unresponsive file system may delay a fork."""
_MAX_START_S: Final = 3.0
"""Maximum time, in seconds, for which the start of a profiler may delay a fork."""

_log = logging.getLogger(__name__)


class ForkStep(enum.IntEnum):
    """The order of hooks in the child; reversed before the fork, so that locks nest."""

    RELEASE = 0
    """Close descriptors and mappings shared with the parent."""
    RENEW = 1
    """Replace locks, threads and connections."""
    RESTART = 2
    """Resume publishing and profiling."""


class ForkAware:
    """An object with fork hooks; see :func:`register`."""

    def before_fork(self) -> None:
        """Acquire locks in the parent, so that the child sees consistent data."""

    def after_fork_in_parent(self) -> None:
        """Release the locks in the parent, even if the fork failed."""

    def after_fork_in_child(self) -> None:
        """Reset the object in the child, where only the forking thread exists.

        After C's ``fork()``, :meth:`before_fork` has not run, and any thread of the parent may have
        held any lock. Implementations must use :class:`ProcessLock`, or replace their locks.
        """


class ForkGate:
    """Delays forks while threads use descriptors that children must not inherit.

    Args:
        max_wait_s: the longest delay, in seconds.
    """

    def __init__(self, max_wait_s: float = _MAX_WAIT_S) -> None:
        self._max_wait_s = max_wait_s
        self._changed = threading.Condition()
        self._working = 0
        self._forking = False

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Wait for any fork in progress, and block forks while the body runs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._forking)
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def before_fork(self) -> None:
        """Wait for work in progress to finish, and prevent new work from starting."""
        with self._changed:
            self._forking = True
            self._changed.wait_for(lambda: not self._working, self._max_wait_s)

    def after_fork(self) -> None:
        """Allow :meth:`work` to proceed again in the parent."""
        with self._changed:
            self._forking = False
            self._changed.notify_all()


class ProcessLock:
    """A reentrant lock that is replaced with an unlocked lock in a forked child."""

    def __init__(self) -> None:
        self._locks: dict[int, threading.RLock] = {}  # by pid, for this process and its ancestors

    def acquire(self, timeout_s: float = -1) -> bool:
        """Take the lock, waiting while another thread of this process holds it.

        Returns False if it is still held after ``timeout_s`` seconds; -1 sets no limit.
        """
        return self._get().acquire(timeout=timeout_s)

    def release(self) -> None:
        """Release the lock."""
        self._get().release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _get(self) -> threading.RLock:
        pid = os.getpid()
        return self._locks.get(pid) or self._locks.setdefault(pid, threading.RLock())


class LockedForForks:
    """An object whose lock is held during a fork."""

    _lock: ProcessLock

    def before_fork(self) -> None:
        """Take the lock, so that no thread is in the middle of a change."""
        self._lock.acquire()

    def after_fork(self) -> None:
        """Release the lock."""
        self._lock.release()


class _Fork(NamedTuple):
    held: threading.RLock
    concerned: list[ForkAware]


class _Registry:
    def __init__(self) -> None:
        self._members: tuple[tuple[ForkStep, weakref.ref[ForkAware]], ...] = ()
        self._lock = ProcessLock()  # held while _members changes or a child's hooks run
        self._one_fork = threading.RLock()  # serializes concurrent forks
        self._forks: list[_Fork] = []  # more than one if forks are nested
        self._gate = ForkGate(_MAX_START_S)
        self._armed = False
        self._pid = os.getpid()  # pid of the process that the members belong to
        self._catching_up = 0  # pid of the process whose hooks are running

    def register(self, step: ForkStep, member: ForkAware) -> None:
        """Call an object's hooks on every fork, until it is garbage-collected or unregistered.

        ``os.register_at_fork`` is called on the first registration, not on import. In a child, the
        hooks run after the hooks of an OpenTelemetry SDK that was set up earlier.
        """
        self.catch_up()
        with self._lock:
            kept = [member for member in self._members if member[1]() is not None]
            kept.append((step, weakref.ref(member)))
            self._members = tuple(sorted(kept, key=lambda member: member[0]))
            armed, self._armed = self._armed, True
        if not armed:
            os.register_at_fork(
                before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child
            )
            call_in_workers(self.catch_up)

    def unregister(self, member: ForkAware) -> None:
        """Stop calling an object's hooks."""
        self.catch_up()
        with self._lock:
            self._members = tuple(
                registered for registered in self._members if registered[1]() is not member
            )

    def delay(self) -> contextlib.AbstractContextManager[None]:
        """Delay other threads' forks, by at most 3 s, while the caller opens and registers objects.

        The hooks of an object that registers during a fork do not run in the child, which would
        keep the object's descriptors.
        """
        return self._gate.work()

    def catch_up(self) -> None:
        """Run the child hooks if this process was forked without running them. Thread-safe.

        Costs one system call, getpid(2). Does nothing if the hooks have already run.
        """
        if os.getpid() != self._pid:
            self._run_in_child(None)

    def _before(self) -> None:
        self.catch_up()
        held = self._one_fork
        held.acquire()
        self._gate.before_fork()
        concerned = self._list_members()
        self._forks.append(_Fork(held, concerned))
        for member in reversed(concerned):
            _run(member.before_fork)

    def _in_parent(self) -> None:
        fork = self._forks.pop()
        for member in fork.concerned:
            _run(member.after_fork_in_parent)
        self._gate.after_fork()
        fork.held.release()

    def _in_child(self) -> None:
        # C code may call PyOS_AfterFork_Child without PyOS_BeforeFork; catch_up() may then already
        # have run in this child.
        if os.getpid() != self._pid:
            self._run_in_child(self._forks.pop().concerned if self._forks else None)

    def _run_in_child(self, concerned: list[ForkAware] | None) -> None:
        pid = os.getpid()
        with self._lock:
            # The hooks have already run in this child, or one of them called this method.
            if pid in (self._pid, self._catching_up):
                return
            self._catching_up = pid
            self._one_fork = threading.RLock()
            self._gate = ForkGate(_MAX_START_S)
            for member in self._list_members() if concerned is None else concerned:
                _run(member.after_fork_in_child)
            self._pid = pid

    def _list_members(self) -> list[ForkAware]:
        return [member for _, ref in self._members if (member := ref()) is not None]


def _run(hook: Callable[[], None]) -> None:
    try:
        hook()
    except Exception:  # noqa: BLE001 - logged; the fork is the service's
        _log.exception("a fork hook failed; running the remaining hooks")


_registry: Final = _Registry()
register: Final = _registry.register
unregister: Final = _registry.unregister
catch_up: Final = _registry.catch_up
delay: Final = _registry.delay
