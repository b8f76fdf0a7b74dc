"""Tracks the symbol loader's files: their symbol names, queue entries and counters."""

import os
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from otel_kprofiler.host import DEVICE_RETRY_S
from otel_kprofiler.model import FileDetails, OpenFile, Unresolved
from otel_kprofiler.symbols.user.debug_files import DebugSearch
from otel_kprofiler.symbols.user.file import PENDING, FileSymbols, NamedAddress
from otel_kprofiler.symbols.user.lines_error import LinesProblem
from otel_kprofiler.symbols.user.reopening import WantedFile

UNANSWERED_NS: Final = int(DEVICE_RETRY_S * 1e9)
"""Time after which files on an unresponsive device are read again."""
_AGAIN_NS: Final = 500_000_000  # half of the first nonzero retry delay
_MOST_DOUBLINGS: Final = 10
DROPPED: Final = NamedAddress((), 0, Unresolved.SYMBOLS_DROPPED)
"""Result for a file whose names are missing and will not be read."""
EVICTED: Final = NamedAddress((), 0, Unresolved.SYMBOLS_DROPPED, is_interim=True)
"""Result for a file whose names were evicted and remain missing until the file is reread."""


ReadSymbols = Callable[[FileDetails, OpenFile | bytes, DebugSearch], FileSymbols]
"""Reads symbols from an open file, or from an image in memory. Raises ``SymbolsRefused``."""


class SymbolsRefused(Exception):  # noqa: N818 - an outcome, not a failure
    """Raised if the symbols cannot be used. The message states the reason."""


class QueuedFile:
    """A file's symbol names, or the reason why there are none; shared by all identical files.

    Attributes:
        used: whether the names were used since the last eviction.
        again_ns: time at which the file may be read again after a failure or an eviction.
        reading: the file's latest queue entry. Results for older queue entries are ignored.
    """

    __slots__ = ("_doublings", "_failures", "again_ns", "names", "reading", "used")

    def __init__(self) -> None:
        self.names: FileSymbols | NamedAddress = PENDING
        self.used = False
        self.again_ns = 0
        self.reading: Waiting | None = None
        self._failures: frozenset[NamedAddress | LinesProblem] = frozenset()
        self._doublings = 0

    @property
    def nbytes(self) -> int:
        """Returns the memory used by the file's symbol tables."""
        return 0 if isinstance(self.names, NamedAddress) else self.names.nbytes

    @property
    def is_wanted(self) -> bool:
        """Returns whether the file is not yet queued and may yield more symbols if reread."""
        return self.reading is None and (self.names is EVICTED or lacks_lines(self.names))

    def add_failure(self, failure: NamedAddress | LinesProblem) -> bool:
        """Records why the file could not be read. Returns whether the reason is new."""
        is_first = failure not in self._failures
        self._failures |= {failure}
        return is_first

    def postpone(self, now_ns: int, *, least_ns: int = 0, is_first_free: bool = False) -> None:
        """Postpone reading with a delay that doubles each time. Names that have been read are kept.

        With ``is_first_free``, each delay is 1 s shorter, so that the first delay is zero.
        """
        self.reading = None
        if isinstance(self.names, NamedAddress):
            self.names = EVICTED
        self._doublings = min(self._doublings + 1, _MOST_DOUBLINGS)
        wait_ns = (2**self._doublings - 2 * is_first_free) * _AGAIN_NS
        self.again_ns = now_ns + max(least_ns, wait_ns)

    def evict(self, now_ns: int) -> None:
        """Drop the names until the file is reread."""
        self.names = PENDING
        if self.reading is None:
            self.postpone(now_ns, is_first_free=True)


def lacks_lines(names: FileSymbols | NamedAddress) -> bool:
    """Returns whether rereading the file may yield the missing source lines."""
    return not isinstance(names, NamedAddress) and names.can_retry_lines


class Entry(NamedTuple):
    """The :class:`QueuedFile` for a key, and the data for reopening the file with that key."""

    file: QueuedFile
    wanted: WantedFile


class Waiting(NamedTuple):
    """A file in the queue; ``content`` is None if the file must be reopened."""

    file: QueuedFile
    wanted: WantedFile
    content: OpenFile | bytes | None


class FileReader:
    """Reads the symbol names in queued files; thread-safe."""

    def __init__(
        self,
        read: ReadSymbols,
        reopen: Callable[[WantedFile], OpenFile | bytes | None],
        max_bytes: int,
    ) -> None:
        self._read, self._reopen, self._max_bytes = read, reopen, max_bytes

    def read(
        self, waiting: Waiting, begin_search: Callable[[], bool]
    ) -> FileSymbols | NamedAddress:
        """Reads and closes a file. Returns ``EVICTED`` if the file cannot be reopened.

        Raises ``SymbolsRefused`` if the symbols cannot be used, or ``OSError`` if the file cannot
        be read.
        """
        content, owner = waiting.content, waiting.wanted.owner
        if content is None:
            content = self._reopen(waiting.wanted)
        if content is None:
            return EVICTED
        try:
            search = DebugSearch(f"/proc/{owner}/root" if owner else "", begin_search)
            names = self._read(waiting.wanted.details, content, search)
            if isinstance(content, OpenFile) and content.has_changed():
                raise SymbolsRefused("the file changed while it was being read")
        finally:
            close_content(content)
        if names.nbytes > self._max_bytes:
            size, limit = names.nbytes >> 20, self._max_bytes >> 19
            raise SymbolsRefused(
                f"the symbols occupy {size} MiB, more than half of the {limit} MiB limit; "
                "raise max_user_symbol_megabytes"
            )
        return names


def close_content(content: OpenFile | bytes | None) -> None:
    """Close a file, unless it is an image in memory."""
    if isinstance(content, OpenFile):
        os.close(content.fd)


class LoaderCounts(NamedTuple):
    """Counts of files with sampled code, by load outcome. All counts are taken at the same instant.

    Attributes:
        loaded: files that were read, even if evicted later.
        refused: files that are malformed, too large or unreadable. ``refused``, ``gone`` and
            ``lines_refused`` do not include retries.
        dropped: files that were not read because the queue was full. Dropped files are requested
            again if needed.
        evicted: files whose symbols were dropped to free memory for other files.
        gone: files that could not be reopened, because no visible process maps them and their paths
            refer to other files. Reopening is retried at increasing intervals.
        pending: files waiting to be read.
        bytes: memory used by the symbol tables of all loaded files.
        cpu_ns: CPU time that this process spent reading files.
        lines_refused: loaded files whose source lines cannot be read, by reason.
    """

    loaded: int
    refused: int
    dropped: int
    evicted: int
    gone: int
    pending: int
    bytes: int
    cpu_ns: int
    lines_refused: Mapping[str, int]
