"""Starts a profiler after a delay: in a forked child, or in uWSGI's workers."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from otel_kprofiler import forks
from otel_kprofiler.bpf import without_signals
from otel_kprofiler.forks import ProcessLock
from otel_kprofiler.workers import THREADS_HINT, call_in_workers, lacks_threads

_DELAY_S: Final = 0.2
"""Start delay in seconds, to skip children that soon execute another program."""

_log = logging.getLogger(__name__)


class LaterStart:
    """A deferred start of a profiler. Thread-safe.

    Attributes:
        due: whether the start is still pending. Set ``due`` to False only while holding the lock.
    """

    def __init__(self, start: Callable[[], object], lock: ProcessLock) -> None:
        self._start = start
        self._lock = lock
        self.due = False
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    def in_workers(self) -> str:
        """Start in each forked uWSGI worker, and return why the profiler does not start now."""
        if not self.due:
            self.due = True
            call_in_workers(self._run)
        reason = "starts in each uWSGI worker"
        _log.info("the kernel profiler %s", reason)
        return reason

    def soon(self) -> None:
        """Start in a new thread after a short delay."""
        self.due = True
        self._cancelled = threading.Event()
        thread = threading.Thread(target=self._wait, name="kprofiler-restart", daemon=True)
        with without_signals():
            thread.start()
        self._thread = thread

    def cancel(self) -> None:
        """Cancel a pending start. The caller holds the lock."""
        self.due = False
        self._cancelled.set()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread from :meth:`soon` has ended. The caller does not hold the lock."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _wait(self) -> None:
        if not self._cancelled.wait(_DELAY_S):
            self._run()

    def _run(self) -> None:
        forks.catch_up()
        with self._lock:
            if self.due:
                self._start()


def warn_without_threads() -> None:
    """Log a warning if uWSGI runs threads only while serving requests."""
    if lacks_threads():
        _log.warning(
            "uWSGI runs threads only while serving a request, so profiles are delayed (fix: %s)",
            THREADS_HINT,
        )
