"""Stops several threads within a shared deadline.

A thread that reads a file on an unresponsive file system ends only when the file system responds,
which may never happen. The caller that initiates the shutdown sets a deadline, by which each
component joins its threads. The log names the files that are still being read and, separately, all
other threads that are still running.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

DEFAULT_S: Final = 5.0
"""Stop timeout, in seconds, if no caller has set a deadline."""
_SHARE: Final = 0.5
"""Fraction of the remaining time that one component may use; other components use the remainder."""

_log = logging.getLogger(__name__)
_read: dict[int, str] = {}  # path that each thread is reading, by thread id


class _Stop:
    def __init__(self, timeout_s: float) -> None:
        self.until = time.monotonic() + timeout_s
        self.unread: set[str] = set()
        self.busy: set[str] = set()


_stop: ContextVar[_Stop | None] = ContextVar("stop", default=None)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Record, for the log, the path that this thread is reading; inner blocks take precedence."""
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
    """Limit the total time of :func:`join_all` calls in a block. Nested blocks have no effect."""
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
                "cannot read %s: the file system is not responding; the threads reading it"
                " remain blocked", ", ".join(sorted(stop.unread)),
            )  # fmt: skip
        if stop.busy:
            _log.warning(
                "stopped without waiting for %s: the stop timeout has expired",
                ", ".join(sorted(stop.busy)),
            )


def join_all(threads: Iterable[threading.Thread]) -> bool:
    """Join threads that were asked to stop, skipping threads that never started.

    Returns whether all threads have exited. Threads that have not exited keep running as daemons.
    """
    with stop_within():
        stop = _stop.get()
        assert stop  # noqa: S101 - set by this block, or by an outer block
        started = [thread for thread in threads if thread.ident is not None]
        now = time.monotonic()
        until = now + _SHARE * max(0.0, stop.until - now)
        for thread in started:
            thread.join(max(0.0, until - time.monotonic()))
        alive = [thread for thread in started if thread.is_alive()]
        for thread in alive:
            if path := _read.get(thread.ident or 0):
                stop.unread.add(path)
            else:
                stop.busy.add(thread.name)
    return not alive


def join_and_release(threads: Sequence[threading.Thread], release: Callable[[], None]) -> None:
    """Join threads like :func:`join_all`, and release their resources once all have exited.

    If a descriptor were closed while a thread still used it, the number could be reused, and the
    thread would then access the wrong file. Threads that outlast the deadline are joined in the
    background. ``release`` is called once, in this thread or in a daemon thread.
    """
    if join_all(threads):
        release()
        return

    def release_later() -> None:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        release()

    threading.Thread(target=release_later, name="kprofiler-release", daemon=True).start()
