"""Runs fork hooks in a defined order.

A forked child has one thread and shares its parent's kernel objects. Objects that must react
register themselves with the step in which their hooks run.

Python runs no hooks in a child of C's ``fork()``. There, :func:`catch_up` runs those of children:
uWSGI calls it in its workers; elsewhere each function that a service may call first does, before it
takes a lock, joins a thread or uses memory that is the parent's.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its hook frees a lock in the child, before ours
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
"""A file system that does not answer delays a fork no longer."""

_log = logging.getLogger(__name__)


class ForkStep(enum.IntEnum):
    """Order of hooks in the child; before the fork the order is reversed, so that locks nest."""

    RELEASE = 0
    """Close descriptors and mappings that are shared with the parent."""
    UNHOOK = 1
    """Remove hooks that would announce this process to the parent's kernel program."""
    RENEW = 2
    """Replace locks, threads and connections."""
    RESTART = 3
    """Publish and profile again."""


class ForkAware:
    """An object with fork hooks; see :func:`register`."""

    def before_fork(self) -> None:
        """Take locks in the parent, so that the child sees consistent data."""

    def after_fork_in_parent(self) -> None:
        """Release the locks in the parent, also if the fork failed."""

    def after_fork_in_child(self) -> None:
        """Run in the child, where only the forking thread exists.

        After C's ``fork()``, :meth:`before_fork` has not run, and any thread of the parent may
        have held any lock: use :class:`ProcessLock`, or replace them.
        """


class ForkGate:
    """Open for work except around a fork: descriptors and views of a thread stay in the child."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working = 0
        self._forking = False

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Work that no fork interrupts; waits while one is under way."""
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
        """Wait until nobody works, and let nobody start."""
        with self._changed:
            self._forking = True
            self._changed.wait_for(lambda: not self._working, _MAX_WAIT_S)

    def after_fork(self) -> None:
        """Let work go on, in the parent."""
        with self._changed:
            self._forking = False
            self._changed.notify_all()


class ProcessLock:
    """A reentrant lock of each process: a forked child has another, which nobody holds."""

    def __init__(self) -> None:
        self._locks: dict[int, threading.RLock] = {}  # by pid, of this process and its ancestors

    def acquire(self) -> None:
        """Take the lock; waits while another thread of this process holds it."""
        self._get().acquire()

    def release(self) -> None:
        """Release it."""
        self._get().release()

    def __enter__(self) -> None:
        """Take the lock."""
        self.acquire()

    def __exit__(self, *_: object) -> None:
        """Release it."""
        self.release()

    def _get(self) -> threading.RLock:
        pid = os.getpid()
        return self._locks.get(pid) or self._locks.setdefault(pid, threading.RLock())


class LockedForForks:
    """An object with a lock, which its owner takes before a fork and releases after it."""

    _lock: ProcessLock

    def before_fork(self) -> None:
        """Take the lock, so that no thread is half way through a change."""
        self._lock.acquire()

    def after_fork(self) -> None:
        """Release the lock."""
        self._lock.release()


class _Fork(NamedTuple):
    """A fork in progress: what it holds, and whom it concerns."""

    held: threading.RLock
    concerned: list[ForkAware]


class _Registry:
    def __init__(self) -> None:
        self._members: tuple[tuple[ForkStep, weakref.ref[ForkAware]], ...] = ()
        self._lock = ProcessLock()  # guards changes of the tuple, and the hooks of a child
        self._one_fork = threading.RLock()  # serialises forks of several threads
        self._forks: list[_Fork] = []  # several if nested
        self._armed = False
        self._pid = os.getpid()  # of the process that the members belong to
        self._catching_up = 0  # the same while its hooks run

    def add(self, step: ForkStep, member: ForkAware) -> None:
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

    def discard(self, member: ForkAware) -> None:
        self.catch_up()
        with self._lock:
            self._members = tuple(
                registered for registered in self._members if registered[1]() is not member
            )

    def catch_up(self) -> None:
        if os.getpid() != self._pid:
            self._run_in_child(None)

    def _before(self) -> None:
        self.catch_up()
        held = self._one_fork
        held.acquire()
        concerned = self._list_members()
        self._forks.append(_Fork(held, concerned))
        for member in reversed(concerned):
            _run(member.before_fork)

    def _in_parent(self) -> None:
        fork = self._forks.pop()
        for member in fork.concerned:
            _run(member.after_fork_in_parent)
        fork.held.release()

    def _in_child(self) -> None:
        # C code may call PyOS_AfterFork_Child alone, and after we have caught up.
        if os.getpid() != self._pid:
            self._run_in_child(self._forks.pop().concerned if self._forks else None)

    def _run_in_child(self, concerned: list[ForkAware] | None) -> None:
        pid = os.getpid()
        with self._lock:
            if pid in (self._pid, self._catching_up):  # another thread has, or a hook calls us
                return
            self._catching_up = pid
            self._one_fork = threading.RLock()
            for member in self._list_members() if concerned is None else concerned:
                _run(member.after_fork_in_child)
            self._pid = pid

    def _list_members(self) -> list[ForkAware]:
        return [member for _, ref in self._members if (member := ref()) is not None]


def _run(hook: Callable[[], None]) -> None:
    """Call a hook; log its failure, so that the others still run."""
    try:
        hook()
    except Exception:  # noqa: BLE001 - logged; the fork is the service's
        _log.exception("a fork hook failed")


_registry: Final = _Registry()


def register(step: ForkStep, member: ForkAware) -> None:
    """Call an object's hooks at every fork, until it is collected or unregistered.

    The first call, not the import, registers with ``os.register_at_fork``: in a child, the hooks
    then run after those of an OpenTelemetry SDK that was set up before.
    """
    _registry.add(step, member)


def unregister(member: ForkAware) -> None:
    """Stop calling an object's hooks."""
    _registry.discard(member)


def catch_up() -> None:
    """Run the hooks of children if this process was forked without them; thread-safe.

    Costs a system call, getpid(2). A fork that runs the hooks leaves nothing to do.
    """
    _registry.catch_up()
