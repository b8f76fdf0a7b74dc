"""Keeps forks out of work that a child could not undo."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

_MAX_WAIT_S: Final = 1.0
"""A file system that does not answer delays a fork no longer."""


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
