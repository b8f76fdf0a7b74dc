"""Notices a main loop that no longer runs, and gets it going again."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

STALLED_AFTER_S: Final = 30.0
"""The loop is stalled when it has not come round for so long."""
SIGNAL: Final = signal.SIGUSR1

_log = logging.getLogger(__name__)


class StalledError(Exception):
    """Raised in the main thread, out of whatever holds it up."""


class Watchdog:
    """Raises :class:`StalledError` in the main thread when :meth:`alive` is not called any more.

    That ends a system call that waits as well as a loop in Python; only a wait that the kernel
    does not let be interrupted goes on, and is what health checks are for.

    Args:
        after_s: how long without a sign of life.

    Attributes:
        restarts: how often it has come to that.
    """

    def __init__(self, after_s: float = STALLED_AFTER_S) -> None:
        self.restarts = 0
        self._after_s = after_s
        self._alive_at = time.monotonic()
        self._stop = threading.Event()

    def alive(self) -> None:
        """The loop comes round."""
        self._alive_at = time.monotonic()

    def idle_s(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self._alive_at

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the main thread, which has to be the caller, as long as this goes on."""
        before = signal.signal(SIGNAL, self._break)
        thread = threading.Thread(target=self._watch, name="kprofiler-watchdog", daemon=True)
        self._stop.clear()
        self.alive()
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            signal.signal(SIGNAL, before)

    def _watch(self) -> None:
        main = threading.main_thread().ident
        assert main  # noqa: S101 - it is running
        while not self._stop.wait(self._after_s / 10):
            if self.idle_s() > self._after_s:
                frame = sys._current_frames().get(main)  # noqa: SLF001 - the only way to see it
                where = "".join(traceback.format_stack(frame)) if frame else ""
                _log.error("the main loop has stalled for %.0f s and begins anew; it was here:\n%s",
                           self.idle_s(), where)  # fmt: skip
                self.restarts += 1
                self.alive()
                signal.pthread_kill(main, SIGNAL)

    def _break(self, _number: int, _frame: FrameType | None) -> None:
        # Sent by somebody else, it finds the loop alive a moment ago and harms nothing more than
        # that the loop begins anew.
        if not self._stop.is_set():
            raise StalledError
