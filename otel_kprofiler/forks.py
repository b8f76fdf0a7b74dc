"""What happens at a fork, in one order.

A forked child has one thread and shares the kernel objects of its parent. Every object that
must know registers itself while it lives, with the step at which its turn comes.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)


class ForkStep(enum.IntEnum):
    """Order in the child. Before the fork, steps run in reverse, so that locks nest."""

    RELEASE = 0
    """Close descriptors and mappings that are shared with the parent."""
    UNHOOK = 1
    """Remove hooks that would tell the parent's kernel program about this process."""
    RENEW = 2
    """Replace locks, threads and connections."""
    RESTART = 3
    """Publish and profile again."""


class ForkAware:
    """Something that a fork concerns, from :func:`register` on."""

    def before_fork(self) -> None:
        """In the parent: take the locks without which the child would see half-done work."""

    def after_fork_in_parent(self) -> None:
        """In the parent, also if the fork failed: give the locks back."""

    def after_fork_in_child(self) -> None:
        """In the child, where only the thread that forked lives."""


class _Registry:
    def __init__(self) -> None:
        self._members: tuple[tuple[ForkStep, weakref.ref[ForkAware]], ...] = ()
        self._lock = threading.Lock()  # for changes of the tuple
        self._one_fork = threading.RLock()  # forks of several threads come one after the other
        self._concerned: list[list[ForkAware]] = []  # by the forks that are under way, if nested
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
    """Call a hook; if it fails, the others have their turn all the same."""
    try:
        hook()
    except Exception:  # noqa: BLE001 - logged; the fork is the service's
        _log.exception("a fork was not handled completely")


_registry: Final = _Registry()


def register(step: ForkStep, member: ForkAware) -> None:
    """Call the hooks of an object at every fork until it is collected or unregistered.

    Python's own hook is registered by the first call, not by an import: in a child, it then runs
    after the hooks of an OpenTelemetry SDK that was set up before.
    """
    _registry.add(step, member)


def unregister(member: ForkAware) -> None:
    """Call its hooks no more."""
    _registry.discard(member)
