"""Sharing the interpreter: long work of ours lets the service's threads run in between."""

from __future__ import annotations

import time
from typing import Final

SLICE_S: Final = 0.0003
_CALLS_PER_LOOK: Final = 6
PAUSE_S: Final = 0.00005
"""Long enough for a waiting thread to wake up and take the interpreter lock."""


class Pacer:
    """Call it again and again during long work; it sleeps shortly after each 0.3 ms.

    A thread that computes keeps the interpreter lock for 5 ms before others are let in
    (``sys.getswitchinterval()``), which a service would feel. Called by one thread; its CPU time
    counts, as waiting is no reason to pause.
    """

    def __init__(self) -> None:
        self._since = time.thread_time()
        self._calls = 0

    def __call__(self) -> None:
        """Pause if it is time; mostly called every 10 µs, so it looks at the clock now and then."""
        self._calls += 1
        if self._calls % _CALLS_PER_LOOK:
            return
        if not 0 <= time.thread_time() - self._since <= SLICE_S:
            self.rest()

    def rest(self) -> None:
        """Pause now, such as between two long works."""
        time.sleep(PAUSE_S)
        self._since = time.thread_time()
