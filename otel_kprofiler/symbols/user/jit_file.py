"""Incrementally reads the growing files in which processes describe runtime-generated code."""

import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from otel_kprofiler.host import TICK_NS, HostFiles, read_start_ticks
from otel_kprofiler.model import ProcessKey
from otel_kprofiler.symbols.user.jit_table import JitCode, JitTable

MAX_FILE_BYTES: Final = 256 << 20
"""Limit on bytes read from a file. A perf map of this size contains about five million
functions."""
MAX_UPDATE_BYTES: Final = 256 << 10
"""Maximum number of bytes read per update: about 5,000 perf map lines, parsed in 25 ms."""
MAX_NAME_BYTES: Final = 1024
"""Longer names are truncated."""
ADDRESS_LIMIT: Final = 1 << 64

EventT = TypeVar("EventT")


class MadeFunction(NamedTuple):
    """A runtime-generated function ``[start, end)``, with the source line of one of its addresses.

    If the source line is unknown, ``file`` is empty and ``line`` is 0.
    """

    start: int
    end: int
    name: str
    file: str = ""
    line: int = 0


class Parsed(NamedTuple, Generic[EventT]):
    """The records in a chunk of a file.

    ``used`` is the number of bytes that were parsed, after which the next chunk begins.
    """

    events: Sequence[EventT]
    used: int


class JitFile(ABC, Generic[EventT]):
    """A file in which a process describes its runtime-generated code.

    Thread-safe, but only one thread may update it. A file written by a later process with the same
    pid is not read.
    """

    def __init__(self, process: ProcessKey, files: HostFiles) -> None:
        self._process, self._files = process, files
        self._lock = threading.Lock()  # guards the table and the read state
        self._table = JitTable()
        self._read_ns = -1  # boottime at which the last complete read began
        self._fd = -1
        self._offset = 0
        self._mark, self._mark_at = b"", 0  # bytes compared to detect a replaced file

    def update(self, now_ns: int) -> bool:
        """Read up to :data:`MAX_UPDATE_BYTES` of new data, and return whether there is more.

        May block on file I/O. ``now_ns`` is the current boottime. Raises ``OSError`` if the file is
        missing, or if other users could have written to it.
        """
        self._open()
        size = os.fstat(self._fd).st_size
        with self._lock:
            if self._is_written_anew(size):
                self._begin_anew()
        left = min(size, MAX_FILE_BYTES) - self._offset
        text = os.pread(self._fd, min(left, MAX_UPDATE_BYTES), self._offset)
        parsed = self._parse(text, left)
        has_more = parsed.used > 0 and max(len(text), parsed.used) < left
        with self._lock:
            for event in parsed.events:
                self._apply(event, now_ns)
            self._offset += parsed.used
            self._set_mark(text[: parsed.used])
            if not has_more:
                self._read_ns = now_ns
        return has_more

    def lookup(self, address: int, at_ns: int) -> MadeFunction | None:
        """Returns the function that was at an address at boottime ``at_ns``; None if unknown."""
        with self._lock:
            if at_ns > self._read_ns:
                return None
            code = self._table.lookup(address, at_ns)
            return self._describe(code, address) if code else None

    def has_code_at(self, address: int) -> bool:
        """Returns whether the file has ever named code at an address."""
        with self._lock:
            return self._table.has_code_at(address)

    def end_in(self, start: int, end: int, gone_ns: int) -> None:
        """Mark the functions in ``[start, end)`` as removed at boottime ``gone_ns``."""
        with self._lock:
            self._table.end_in(start, end, gone_ns)

    @property
    def nbytes(self) -> int:
        """Returns the approximate memory used by the functions."""
        return self._table.nbytes

    def close(self) -> None:
        """Close the file. Functions already read remain available to lookups."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @abstractmethod
    def _open_file(self) -> int:
        """Open the process's current file. Raises ``OSError`` if it is missing or untrusted."""

    @abstractmethod
    def _parse(self, text: bytes, left: int) -> Parsed[EventT]:
        """Parse the next chunk of the file.

        ``left`` is the number of bytes left in the file, including ``text``.
        """

    @abstractmethod
    def _apply(self, event: EventT, now_ns: int) -> None:
        """Apply a record from the file to the table."""

    @abstractmethod
    def _set_mark(self, text: bytes) -> None:
        """Save some of the bytes read, to detect later whether the file has been replaced."""

    def _describe(self, code: JitCode, address: int) -> MadeFunction:
        return MadeFunction(code.start, code.end, code.name.decode("utf-8", "backslashreplace"))

    def _add(self, code: JitCode, now_ns: int) -> None:
        """Add a function that has no timestamp and was written since the last read."""
        since_ns = 0 if self._table.is_first(code) else now_ns
        self._table.add(code, since_ns=since_ns, seen_ns=now_ns, gone_ns=self._read_ns)

    def _is_written_anew(self, size: int) -> bool:
        mark = os.pread(self._fd, len(self._mark), self._mark_at)
        return size < self._offset or mark != self._mark

    def _begin_anew(self) -> None:
        self._table.end_all(self._read_ns)
        self._offset, self._mark = 0, b""

    def _open(self) -> None:
        """Open the process's current file. On failure, keep the file that was opened last."""
        try:
            fd = self._open_file()
        except OSError:
            if self._fd < 0:
                raise
            return
        if self._fd >= 0:
            if os.path.samestat(os.fstat(fd), os.fstat(self._fd)):
                os.close(fd)
                return
            os.close(self._fd)
            with self._lock:
                self._begin_anew()
        self._fd = fd


class Writer(NamedTuple):
    """The process that writes a file: its effective user, and its pid in its pid namespace."""

    user: int
    pid: int


def read_writer(process: ProcessKey, files: HostFiles) -> Writer:
    """Reads the uid and pid of a JIT-file writer from ``/proc/PID/status``.

    Raises ``OSError`` on failure.
    """
    status = files.read_bytes(f"/proc/{process.tgid}/status")
    fields = dict(line.split(b":", 1) for line in status.splitlines() if b":" in line)
    try:
        return Writer(int(fields[b"Uid"].split()[1]), int(fields[b"NSpid"].split()[-1]))
    except (KeyError, ValueError, IndexError) as error:
        text = f"/proc/{process.tgid}/status has no valid Uid or NSpid"
        raise FileNotFoundError(text) from error


def is_only_of(writer: Writer, status: os.stat_result) -> bool:
    """Returns whether a file is regular, not world-writable, and owned by the writer or root."""
    is_private = stat.S_ISREG(status.st_mode) and not status.st_mode & stat.S_IWOTH
    return is_private and status.st_uid in (writer.user, 0)


def is_running(process: ProcessKey, files: HostFiles) -> bool:
    """Returns whether the process is still running and its pid has not been reused."""
    return read_start_ticks(files, process.tgid) == (process.start_time_ns or 0) // TICK_NS
