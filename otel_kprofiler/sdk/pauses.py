"""Pauses a profiler for as long as any thread is in a block that pauses it."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from otel_kprofiler import forks
from otel_kprofiler.forks import ProcessLock
from otel_kprofiler.sdk.session import Session


class Pauses:
    """The ``with`` blocks in which a profiler is paused. Thread-safe.

    Args:
        lock: held while a session is paused or resumed.
        find_session: returns the running session; None if there is none.
    """

    def __init__(self, lock: ProcessLock, find_session: Callable[[], Session | None]) -> None:
        self._lock = lock
        self._find_session = find_session
        self._blocks: Counter[int] = Counter()  # number of blocks by thread

    def __bool__(self) -> bool:
        return bool(self._blocks)

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Pause sampling in a ``with`` block."""
        thread = threading.get_ident()
        self._change(thread, 1)
        try:
            yield
        finally:
            self._change(thread, -1)

    def _change(self, thread: int, by: int) -> None:
        forks.catch_up()
        with self._lock:
            earlier, self._blocks = self._blocks, self._blocks + Counter({thread: by})
            session = self._find_session()
            if session is not None and not (earlier and self._blocks):
                (session.pause if self._blocks else session.resume)()

    def after_fork_in_child(self) -> None:
        """Keep only the forking thread's blocks, because other threads never leave theirs."""
        thread = threading.get_ident()
        self._blocks = +Counter({thread: self._blocks[thread]})
