"""Yields the GIL during long computations, so that the service's threads can run."""

import time
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")

SLICE_S: Final = 0.0003
_CALLS_PER_LOOK: Final = 6
PAUSE_S: Final = 0.00005
"""Length of a pause, in seconds; enough for a waiting thread to wake up and take the GIL."""


class Pacer:
    """When called repeatedly, sleeps briefly after every 0.3 ms of CPU time.

    A busy thread keeps the GIL for 5 ms before other threads can run (``sys.getswitchinterval()``),
    which would be noticeable in a service. CPU time is measured rather than elapsed time, because
    other threads can run while a thread waits. For use in a single thread.
    """

    def __init__(self) -> None:
        self._since = time.thread_time()
        self._calls = 0

    def __call__(self) -> None:
        """Pause if a pause is due. Call this about every 10 µs. Only some calls read the clock."""
        self._calls += 1
        if self._calls % _CALLS_PER_LOOK:
            return
        if not 0 <= time.thread_time() - self._since <= SLICE_S:
            self.rest()

    def rest(self) -> None:
        """Pause now, for example between two long operations."""
        time.sleep(PAUSE_S)
        self._since = time.thread_time()


def paced(items: Iterable[T]) -> Iterator[T]:
    """Yields the items, and pauses between them when a pause is due."""
    pause = Pacer()
    for item in items:
        pause()
        yield item
