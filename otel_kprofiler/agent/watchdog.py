"""Says when the main loop no longer comes round, and where it is. It never interferes."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

STALLED_AFTER_S: Final = 30.0
"""The loop is stalled when it has not come round for so long."""

_LOOKS: Final = 10

_log = logging.getLogger(__name__)


class Watchdog:
    """Looks for a sign of life of the main loop in regular intervals.

    It counts looks, not seconds: while the whole process stands still (SIGSTOP, a paused
    container or virtual machine), nobody looks, and the loop has missed nothing.

    What to do about a stall is up to whoever supervises the process (``/livez``, systemd's
    watchdog). An exception thrown into the loop would free it from a wait that ends by itself,
    and from a defect at the price of whatever the loop held at that moment.

    Args:
        after_s: how long without a sign of life is a stall.

    Attributes:
        stalls: how often it has come to that.
    """

    def __init__(self, after_s: float = STALLED_AFTER_S) -> None:
        self.stalls = 0
        self._interval_s = after_s / _LOOKS
        self._looks = 0  # since the last sign of life
        self._stop = threading.Event()

    def alive(self) -> None:
        """The loop makes progress; called for each sample while there is much to do."""
        self._looks = 0

    def idle_s(self) -> float:
        """Seconds since the last sign of life, to one look."""
        return self._looks * self._interval_s

    def find_stall(self) -> list[str]:
        """What is wrong with the loop, in one sentence; from any thread."""
        if self._looks < _LOOKS:
            return []
        return [f"the loop has not run for {self.idle_s():.0f} s"]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calling thread as long as this goes on."""
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
            self._looks += 1
            was_stalled, is_stalled = is_stalled, self._looks >= _LOOKS
            if is_stalled and not was_stalled:
                self.stalls += 1
                frame = sys._current_frames().get(thread)  # noqa: SLF001 - the only way to see it
                where = "".join(traceback.format_stack(frame)) if frame else ""
                _log.error("the main loop has stalled for %.0f s; it is here:\n%s",
                           self.idle_s(), where)  # fmt: skip
            elif was_stalled and not is_stalled:
                _log.warning("the main loop goes on")
