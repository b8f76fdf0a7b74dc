"""Distributes requests to workers, round-robin by process.

Opening files takes priority, because processes may exit. Tables are loaded as fast as the CPU
budget permits.
"""

import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from otel_kprofiler.host import FairQueue, FileRequest, Turn, find_user
from otel_kprofiler.unwinding.loading import Code

MAX_OPEN: Final = 64
"""Maximum number of files kept open while waiting to be loaded. Excess files are closed, and
reopened later."""


class Opened(NamedTuple):
    """A request whose file has been opened; ``code`` is None if the file must be reopened."""

    request: FileRequest
    code: Code | None


class RequestQueue:
    """A queue of requests and opened files; thread-safe.

    In the long term, opening files uses at most ``open_share`` of one CPU, and loading tables at
    most ``load_share``. At most ``loaders`` workers load tables at a time; other workers only open
    files.
    """

    def __init__(
        self, open_share: float, load_share: float, loaders: int, now_ns: Callable[[], int]
    ) -> None:
        self._changed = threading.Condition()
        self._unopened: FairQueue[FileRequest] = FairQueue(open_share, now_ns, find_user)
        self._opened: FairQueue[Opened] = FairQueue(load_share, now_ns, find_user)
        self._loaders = loaders
        self._loading = self._open = 0
        self._stopping = False

    def put(self, request: FileRequest) -> None:
        """Add a request; a worker opens its file."""
        with self._changed:
            self._unopened.put(request.tgid, request)
            self._changed.notify()

    def put_opened(self, opened: Opened) -> None:
        """Queue an opened file for loading.

        If too many files are open, close the file, and let a worker reopen it later.
        """
        with self._changed:
            if opened.code is not None and (self._stopping or self._open >= MAX_OPEN):
                opened.code.close()
                opened = opened._replace(code=None)
            self._open += opened.code is not None
            self._opened.put(opened.request.tgid, opened)
            self._changed.notify()

    def take(self) -> Turn[FileRequest] | Turn[Opened] | None:
        """Waits for work. The caller closes any opened file. Returns None after :meth:`stop`."""
        with self._changed:
            while not self._stopping:
                if (unopened := self._unopened.take()) is not None:
                    return unopened
                waits_ns = [self._unopened.wait_ns()]
                if self._loading < self._loaders:
                    if (opened := self._opened.take()) is not None:
                        self._loading += 1
                        self._open -= opened.item.code is not None
                        return opened
                    waits_ns.append(self._opened.wait_ns())
                known_ns = [wait_ns for wait_ns in waits_ns if wait_ns is not None]
                self._changed.wait(min(known_ns) / 1e9 if known_ns else None)
            return None

    def done(self, taken: Turn[FileRequest] | Turn[Opened], cpu_ns: int) -> None:
        """Ends a request's turn, and charges the CPU time that it used."""
        with self._changed:
            if isinstance(taken.item, Opened):
                self._loading -= 1
                self._opened.done(taken, cpu_ns)
                self._changed.notify()
            else:
                self._unopened.done(taken, cpu_ns)

    def stop(self) -> None:
        """Stop all workers."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the files; call after all workers have exited. Also works in a forked child."""
        for opened in self._opened.clear():
            if opened.code is not None:
                opened.code.close()
