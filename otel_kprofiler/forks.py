"""Runs fork hooks in a defined order.

A forked child has one thread and shares its parent's kernel objects. Objects that must react
register themselves with the step in which their hooks run.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Final

_MAX_WAIT_S: Final = 1.0
"""A file system that does not answer delays a fork no longer."""

_log = logging.getLogger(__name__)


class ForkStep(enum.IntEnum):
    """Order of hooks in the child; before the fork the order is reversed, so that locks nest."""

    RELEASE = 0
    """Close descriptors and mappings that are shared with the parent."""
    UNHOOK = 1
    """Remove hooks that would tell the parent's kernel program about this process."""
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
        """Run in the child, where only the forking thread exists."""


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


class _Registry:
    def __init__(self) -> None:
        self._members: tuple[tuple[ForkStep, weakref.ref[ForkAware]], ...] = ()
        self._lock = threading.Lock()  # guards changes of the tuple
        self._one_fork = threading.RLock()  # serialises forks of several threads
        self._concerned: list[list[ForkAware]] = []  # members per fork in progress, if nested
        self._armed = False

    def add(self, step: ForkStep, member: ForkAware) -> None:
        with self._lock:
            kept = [one for one in self._members if one[1]() is not None]
            kept.append((step, weakref.ref(member)))
            self._members = tuple(sorted(kept, key=lambda one: one[0]))
            armed, self._armed = self._armed, True
        if not armed:
            os.register_at_fork(
                before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child
            )

    def discard(self, member: ForkAware) -> None:
        with self._lock:
            self._members = tuple(one for one in self._members if one[1]() is not member)

    def _before(self) -> None:
        self._one_fork.acquire()
        concerned = [member for _, ref in self._members if (member := ref()) is not None]
        self._concerned.append(concerned)
        for member in reversed(concerned):
            _run(member.before_fork)

    def _in_parent(self) -> None:
        for member in self._concerned.pop():
            _run(member.after_fork_in_parent)
        self._one_fork.release()

    def _in_child(self) -> None:
        self._lock = threading.Lock()
        for member in self._concerned.pop():
            _run(member.after_fork_in_child)
        self._one_fork.release()


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
