"""Starts a profiler later: in a forked child, or in the workers of uWSGI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from otel_kprofiler import forks
from otel_kprofiler.bpf import without_signals
from otel_kprofiler.forks import ProcessLock
from otel_kprofiler.workers import call_in_workers

_DELAY_S: Final = 0.2
"""Skips children that soon execute another program."""


class LaterStart:
    """A start that is due later; thread-safe.

    Args:
        start: starts the profiler.
        lock: guards the profiler's start and stop.

    Attributes:
        due: whether it is still wanted; reset it with the lock.
    """

    def __init__(self, start: Callable[[], object], lock: ProcessLock) -> None:
        self._start = start
        self._lock = lock
        self.due = False

    def in_workers(self) -> None:
        """Start in each worker of uWSGI that is forked."""
        if not self.due:
            self.due = True
            call_in_workers(self._run)

    def soon(self) -> None:
        """Start in some time, in a thread."""
        self.due = True
        thread = threading.Thread(target=self._wait, name="kprofiler-restart", daemon=True)
        with without_signals():
            thread.start()

    def _wait(self) -> None:
        time.sleep(_DELAY_S)
        self._run()

    def _run(self) -> None:
        forks.catch_up()
        with self._lock:
            if self.due:
                self._start()
