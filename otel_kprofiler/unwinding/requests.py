"""Gives requests to workers, the most urgent first.

Files are opened at once, because their processes end, and their tables are loaded as the share of
CPU time allows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from otel_kprofiler.host import CpuShare, FileRequest
from otel_kprofiler.unwinding.loading import Code

MAX_OPEN: Final = 64
"""Files that stay open until their tables are loaded; others are opened again for it."""


class Opened(NamedTuple):
    """A request whose file is known by now.

    Attributes:
        request: the request.
        code: None if it is to be opened again.
    """

    request: FileRequest
    code: Code | None


class RequestQueue:
    """Requests and opened files; thread-safe.

    Args:
        open_share: of one CPU that opening may take in the long run.
        load_share: likewise, for loading.
        loaders: workers that may load at the same time; the others open files.
        now_ns: the time.
    """

    def __init__(
        self, open_share: float, load_share: float, loaders: int, now_ns: Callable[[], int]
    ) -> None:
        self._changed = threading.Condition()
        self._unopened: deque[FileRequest] = deque()
        self._opened: deque[Opened] = deque()
        self._open_share, self._load_share = CpuShare(open_share), CpuShare(load_share)
        self._loaders = loaders
        self._now_ns = now_ns
        self._loading = self._open = 0
        self._stopping = False

    def put(self, request: FileRequest) -> None:
        """Add a request whose file is to be opened."""
        with self._changed:
            self._unopened.append(request)
            self._changed.notify()

    def put_opened(self, opened: Opened) -> None:
        """Add one whose tables are to be loaded; the file is closed if too many are open."""
        with self._changed:
            if opened.code is not None and (self._stopping or self._open >= MAX_OPEN):
                opened.code.close()
                opened = opened._replace(code=None)
            self._open += opened.code is not None
            self._opened.append(opened)
            self._changed.notify()

    def take(self) -> FileRequest | Opened | None:
        """Wait for the next, whose file is the caller's now; None at the end."""
        with self._changed:
            while not self._stopping:
                waits_s = []
                if self._unopened:
                    waits_s.append(self._wait_s(self._open_share))
                    if not waits_s[-1]:
                        return self._unopened.popleft()
                if self._opened and self._loading < self._loaders:
                    waits_s.append(self._wait_s(self._load_share))
                    if not waits_s[-1]:
                        self._loading += 1
                        opened = self._opened.popleft()
                        self._open -= opened.code is not None
                        return opened
                self._changed.wait(min(waits_s, default=None))
            return None

    def done(self, taken: FileRequest | Opened, cpu_ns: int) -> None:
        """Ends the requests that were taken; charges their CPU time."""
        with self._changed:
            if isinstance(taken, Opened):
                self._loading -= 1
                self._load_share.spend(cpu_ns)
                self._changed.notify()
            else:
                self._open_share.spend(cpu_ns)

    def stop(self) -> None:
        """Let all workers end."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the files, when there are no workers any more; also in a forked child."""
        while self._opened:
            code = self._opened.popleft().code
            if code is not None:
                code.close()

    def _wait_s(self, share: CpuShare) -> float:
        return share.wait_ns(self._now_ns()) / 1e9
