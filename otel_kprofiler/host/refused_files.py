"""Tracks files on which a child process spent CPU time without producing a result."""

import os
import threading
import time
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from otel_kprofiler.host.growing_holds import GrowingHolds

REFUSAL_S: Final = 3600.0
"""Time until an unchanged refused file is read again, in seconds."""
MAX_REFUSED: Final = 1024
"""Maximum number of remembered files. The oldest entries are evicted first."""

T = TypeVar("T")


class RefusedFiles(Generic[T]):
    """Remembers refused files, so that a file that exceeds its CPU time limit is rarely reread.

    After a temporary failure, the file is reread after 30 s, then at doubling intervals of up to an
    hour. Thread-safe.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._holds = GrowingHolds()
        self._reasons: dict[Hashable, tuple[float, T]] = {}  # expiry and reason, oldest first

    def add(self, file: Hashable, reason: T, *, may_pass: bool = False) -> None:
        """Remember why a file, identified by :func:`identify_content`, was refused.

        ``may_pass`` marks a temporary failure, after which the unchanged file is retried sooner.
        """
        with self._lock:
            self._reasons.pop(file, None)
            hold_s = self._holds.extend(file) if may_pass else REFUSAL_S
            self._reasons[file] = self._now_s() + hold_s, reason
            if len(self._reasons) > MAX_REFUSED:
                del self._reasons[next(iter(self._reasons))]

    def find(self, file: Hashable) -> T | None:
        """Returns why a file is refused; None if it may be read."""
        with self._lock:
            end_s, reason = self._reasons.get(file, (0.0, None))
            return reason if self._now_s() < end_s else None


def identify_content(fd: int) -> Hashable:
    """Returns a key for an open file; a changed file has a different key."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
