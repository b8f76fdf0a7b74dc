"""Queues files whose tables child processes must build, and lets few of them be built at a time."""

from collections.abc import Callable
from typing import Final

from otel_kprofiler.host import FairQueue, FileRequest, Turn, find_user
from otel_kprofiler.model import FileKey
from otel_kprofiler.unwinding.loading import Code
from otel_kprofiler.unwinding.requests import Opened

MAX_KEPT: Final = 64
"""Maximum number of waiting files that are kept open. Other files are reopened for their turn."""
KEEP_NS: Final = 1_000_000_000
"""Time after which a waiting file is closed. An open file prevents its file system from being
unmounted, and its blocks from being freed."""


class BuildQueue:
    """A queue of requests, round-robin by process; not thread-safe.

    In the long term, building tables uses at most ``share`` of one CPU.
    """

    def __init__(self, share: float, now_ns: Callable[[], int]) -> None:
        self._waiting: FairQueue[FileRequest] = FairQueue(share, now_ns, find_user)
        self._now_ns = now_ns
        self._kept: dict[FileKey, tuple[Code, int]] = {}  # with the time from which it is kept
        self._turns: dict[FileKey, Turn[FileRequest]] = {}  # files whose tables may be built now
        self._cpu_ns = 0  # CPU time of builds that is not charged to a turn yet

    def __len__(self) -> int:
        """Returns the number of requests that are waiting for a turn."""
        return len(self._waiting)

    def has_turn(self, key: FileKey) -> bool:
        """Returns whether the file's tables may be built now."""
        return key in self._turns

    def put(self, request: FileRequest) -> None:
        """Add a request."""
        self._waiting.put(request.tgid, request)

    def keep(self, key: FileKey, code: Code) -> bool:
        """Keep the file of a waiting request open. Return False if too many files are open."""
        if len(self._kept) >= MAX_KEPT:
            return False
        self._kept[key] = code, self._now_ns()
        return True

    def take_old(self) -> list[tuple[FileKey, Code]]:
        """Returns the files that have been open for ``KEEP_NS``, for the caller to close."""
        until_ns = self._now_ns() - KEEP_NS
        old = [(key, code) for key, (code, kept_ns) in self._kept.items() if kept_ns <= until_ns]
        for key, _ in old:
            del self._kept[key]
        return old

    def take(self, most: int) -> Opened | None:
        """Give the next request a turn; returns None if ``most`` requests have a turn already.

        The caller closes the request's file if it was kept open.
        """
        turn = self._waiting.take() if len(self._turns) < most else None
        if turn is None:
            return None
        key = turn.item.key
        self._turns[key] = turn
        code, _ = self._kept.pop(key, (None, 0))
        return Opened(turn.item, code)

    def charge(self, cpu_ns: int) -> None:
        """Charge the CPU time of a build to the turn that ends next."""
        self._cpu_ns += cpu_ns

    def end_turn(self, key: FileKey) -> None:
        """End a file's turn, if it has one."""
        if (turn := self._turns.pop(key, None)) is not None:
            self._waiting.done(turn, self._cpu_ns)
            self._cpu_ns = 0

    def close(self) -> None:
        """Close the files; call after all workers have exited. Also works in a forked child."""
        for code, _ in self._kept.values():
            code.close()
        self._kept.clear()
