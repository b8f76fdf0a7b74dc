"""One deadline for all threads that are stopped together.

A thread that reads a file of a file system that does not answer ends when that does, or never. The
caller that stops everything sets a deadline, each part joins its threads within it, and one line of
the log names the files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

DEFAULT_S: Final = 5.0
"""Time to stop, if no caller has set a deadline."""
_SHARE: Final = 0.5
"""Share of what is left that one part may take: threads of the next have time to end, too."""

_log = logging.getLogger(__name__)
_read: dict[int, str] = {}  # what each thread reads


class _Stop:
    def __init__(self, timeout_s: float) -> None:
        self.until = time.monotonic() + timeout_s
        self.unread: set[str] = set()


_stop: ContextVar[_Stop | None] = ContextVar("stop", default=None)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Name what this thread reads, for the log if it does not end; the innermost block counts."""
    thread = threading.get_ident()
    outer = _read.get(thread)
    _read[thread] = path
    try:
        yield
    finally:
        if outer is None:
            del _read[thread]
        else:
            _read[thread] = outer


@contextmanager
def stop_within(timeout_s: float = DEFAULT_S) -> Iterator[None]:
    """Limit the :func:`join_all` in this block of this thread together; the outermost block counts.

    Args:
        timeout_s: in seconds; 0: threads are not waited for.
    """
    if _stop.get() is not None:
        yield
        return
    stop = _Stop(timeout_s)
    token = _stop.set(stop)
    try:
        yield
    finally:
        _stop.reset(token)
        if stop.unread:
            _log.warning(
                "cannot read %s: the file system does not answer; threads that read it go on until"
                " it does", ", ".join(sorted(stop.unread)),
            )  # fmt: skip


def join_all(threads: Iterable[threading.Thread]) -> bool:
    """Join threads that were asked to end, and that may not have been started.

    Returns:
        Whether all have ended; the others go on, as daemons.
    """
    with stop_within():
        stop = _stop.get()
        assert stop  # noqa: S101 - of this block, or of an outer one
        started = [thread for thread in threads if thread.ident is not None]
        now = time.monotonic()
        until = now + _SHARE * max(0.0, stop.until - now)
        for thread in started:
            thread.join(max(0.0, until - time.monotonic()))
        alive = [thread for thread in started if thread.is_alive()]
        stop.unread |= {
            _read.get(thread.ident or 0, f"what {thread.name} reads") for thread in alive
        }
    return not alive
