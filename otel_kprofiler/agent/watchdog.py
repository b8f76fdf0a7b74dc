"""Detects and logs stalls of the main loop, without interfering with the loop."""

import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

STALLED_AFTER_S: Final = 30.0
"""Time without progress after which the loop counts as stalled."""

_CHECKS: Final = 10

_log = logging.getLogger(__name__)


class Watchdog:
    """Checks at regular intervals whether the main loop makes progress.

    Counts checks rather than seconds, so that the loop does not count as stalled while the whole
    process is stopped (SIGSTOP, a paused container or virtual machine).

    Reacting to a stall is up to the supervisor (``/livez``, systemd's watchdog). An exception
    injected into the loop could interrupt a wait that would have completed, and lose samples.

    Args:
        after_s: time without progress that counts as a stall, in seconds.
    """

    def __init__(self, after_s: float = STALLED_AFTER_S) -> None:
        self.stalls = 0
        self._interval_s = after_s / _CHECKS
        self._missed_checks = 0  # number of checks since the last progress
        self._stop = threading.Event()

    def alive(self) -> None:
        """Report progress. Call this at least once in every iteration of the loop."""
        self._missed_checks = 0

    def idle_s(self) -> float:
        """Returns the seconds since the last progress, rounded to the check interval."""
        return self._missed_checks * self._interval_s

    def find_stall(self) -> list[str]:
        """Returns a description of the current stall, or an empty list. Thread-safe."""
        if self._missed_checks < _CHECKS:
            return []
        return [f"the main loop has stalled for {self.idle_s():.0f} s"]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calling thread's main loop until the context exits."""
        thread = threading.Thread(
            target=self._watch, args=(threading.get_ident(),), name="kprofiler-watchdog"
        )
        thread.daemon = True
        self._stop.clear()
        self.alive()
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _watch(self, thread: int) -> None:
        is_stalled = False
        while not self._stop.wait(self._interval_s):
            self._missed_checks += 1
            was_stalled, is_stalled = is_stalled, self._missed_checks >= _CHECKS
            if is_stalled and not was_stalled:
                self.stalls += 1
                frame = sys._current_frames().get(thread)  # noqa: SLF001 - no public equivalent
                where = "".join(traceback.format_stack(frame)) if frame else ""
                _log.error("the main loop has stalled for %.0f s; its stack:\n%s",
                           self.idle_s(), where)  # fmt: skip
            elif was_stalled and not is_stalled:
                _log.warning("the main loop is running again")
