"""Functions of JIT compilers, from the file ``/tmp/perf-PID.map`` that many write for perf(1).

A line for each function: ``START SIZE NAME``, in hexadecimal (tools/perf/Documentation/
jit-interface.txt of Linux). Among the writers are V8 (``--perf-basic-prof``), Python
(``-X perf``), .NET, Erlang, and the JVM (``Compiler.perfmap``).

Lines have no times, and memory of code is used again. A name is given for an address and a time:

- The file was read after that time. Whoever asks about a later time gets none until the next read.
- An address with one owner in all of the file has this owner's name.
- One that changed hands between two reads has the former name until the first of them, the new one
  from the second on, and none in between.

So the old name is never given for new code, provided that the writer tells its functions before it
calls them, as those above do. One that keeps lines back in a buffer can have an old name shown
until it writes them. When memory is unmapped or code is freed, nothing is written: that something
else is there, with no line of its own, cannot be known from the file.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from functools import partial
from typing import Final, NamedTuple

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import TICK_NS, HostFiles, read_start_ticks
from otel_kprofiler.model import ProcessKey
from otel_kprofiler.symbols.user.functions import Function
from otel_kprofiler.symbols.user.jit_table import MAX_CODE_BYTES, JitCode, JitTable

MAX_FILE_BYTES: Final = 256 << 20
"""Lines behind this are not read: some five million functions."""
MAX_UPDATE_BYTES: Final = 1 << 20
"""What one update reads: some 20,000 lines, 100 ms."""
MAX_NAME_BYTES: Final = 1024
"""Longer names are cut off."""
_LONGEST_LINE: Final = 64 * 1024
_TAIL_BYTES: Final = 256  # compared, to see whether what was read is still there
_ADDRESS_LIMIT: Final = 1 << 64
_FILE_TIME_NS: Final = 20_000_000  # times of files are those of the last tick of the kernel
_LINE: Final = re.compile(
    rb"^(?:0x)?([0-9a-fA-F]{1,16})[ \t]+(?:0x)?([0-9a-fA-F]{1,16})[ \t]+([^\n]+)$", re.MULTILINE
)


class PerfMapLines(NamedTuple):
    """Functions in the order of their lines, and the number of lines that are none."""

    codes: list[JitCode]
    damaged: int


def parse_perf_map(text: bytes) -> PerfMapLines:
    """Parse whole lines. Empty lines do not count, nor do functions of no size."""
    codes = []
    good = 0
    for start_digits, size_digits, name in _LINE.findall(text):
        start, size = int(start_digits, 16), int(size_digits, 16)
        name = name[:MAX_NAME_BYTES].strip()  # noqa: PLW2901 - without its end of line
        if name and size <= MAX_CODE_BYTES and start + size <= _ADDRESS_LIMIT:
            good += 1
            if size:
                codes.append(JitCode(start, start + size, name))
    lines = sum(1 for line in text.split(b"\n") if line.strip())
    return PerfMapLines(codes, lines - good)


class PerfMapCounts(NamedTuple):
    """Counters of a map.

    Attributes:
        functions: those known now.
        damaged: lines that are none, or too long.
        dropped: functions that did not fit into memory.
        unread_bytes: of the file, at the last read.
        nbytes: memory in use.
    """

    functions: int
    damaged: int
    dropped: int
    unread_bytes: int
    nbytes: int


class PerfMap:
    """The map of one process. Thread-safe; ``update`` is for one thread.

    Args:
        process: whose map, with its start time: that of a later process with its pid is not read.
        files: for ``/proc``.
        clock: to compare times of files.
        root: where the host's files are; another for tests.
    """

    def __init__(self, process: ProcessKey, files: HostFiles, clock: Clock, root: str = "") -> None:
        self._open_map = partial(open_perf_map, process, files, clock, root)
        self._lock = threading.Lock()  # guards the table and what was read
        self._table = JitTable()
        self._read_ns = -1  # the last complete read began
        self._damaged = 0
        self._fd = -1
        self._offset = 0
        self._tail = b""
        self._unread = 0

    def update(self, now_ns: int) -> bool:
        """Read what the process has added; call again at once if that was not all.

        Reads at most :data:`MAX_UPDATE_BYTES`. Waits for the disk, or for whatever file system
        the process has put its ``/tmp`` on.

        Args:
            now_ns: the current boot time.

        Returns:
            Whether there is more to read.

        Raises:
            OSError: the process has no map, or one that others could have written.
        """
        self._open()
        status = os.fstat(self._fd)
        with self._lock:
            if self._is_written_anew(status.st_size):
                self._begin_anew()
        end = min(status.st_size, MAX_FILE_BYTES)
        text = os.pread(self._fd, min(end - self._offset, MAX_UPDATE_BYTES), self._offset)
        has_more = self._offset + len(text) < end
        whole = text[: text.rfind(b"\n") + 1]
        damaged = 0
        if not whole and len(text) > _LONGEST_LINE:  # goes on where the line does
            whole, damaged = text, 1
        lines = parse_perf_map(whole if not damaged else b"")
        with self._lock:
            for code in lines.codes:
                self._add(code, now_ns)
            self._damaged += lines.damaged + damaged
            self._offset += len(whole)
            self._tail = (self._tail + whole)[-_TAIL_BYTES:]
            self._unread = status.st_size - self._offset
            if not has_more:
                self._read_ns = now_ns
        return has_more

    def lookup(self, address: int, at_ns: int) -> Function | None:
        """The function that was at an address at a boot time; None if that is not known."""
        with self._lock:
            if at_ns > self._read_ns:
                return None
            return self._table.lookup(address, at_ns)

    @property
    def read_ns(self) -> int:
        """Times up to this one can be looked up; -1 before the first complete read."""
        return self._read_ns

    def counts(self) -> PerfMapCounts:
        """The counters."""
        with self._lock:
            table = self._table
            return PerfMapCounts(
                len(table), self._damaged, table.dropped, self._unread, table.nbytes
            )  # fmt: skip

    def close(self) -> None:
        """Close the file; what is known remains."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _add(self, code: JitCode, now_ns: int) -> None:
        since_ns = 0 if self._table.is_first(code) else now_ns
        self._table.add(code, since_ns=since_ns, seen_ns=now_ns, gone_ns=self._read_ns)

    def _is_written_anew(self, size: int) -> bool:
        tail = len(self._tail)
        return size < self._offset or os.pread(self._fd, tail, self._offset - tail) != self._tail

    def _begin_anew(self) -> None:
        self._table.end_all(self._read_ns)
        self._offset, self._tail = 0, b""

    def _open(self) -> None:
        """Open the file as it is found now; after the end of the process, go on with it."""
        try:
            fd = self._open_map()
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


def open_perf_map(process: ProcessKey, files: HostFiles, clock: Clock, root: str = "") -> int:
    """Open the map of a process, as the process sees its ``/tmp``, or else in that of the host.

    It must be a regular file of the process's user or of root, not writable for everyone, and
    written since the process began.

    Args:
        process: with its start time.
        files: for ``/proc``.
        clock: to compare times of files.
        root: where the host's files are.

    Raises:
        OSError: there is none, or the process has ended.
    """
    owner, pid = _parse_status(files.read_bytes(f"/proc/{process.tgid}/status"))
    began_ns = process.start_time_ns or 0
    refusal: OSError = FileNotFoundError(f"process {process.tgid} has no perf map")
    for directory in (f"{root}/proc/{process.tgid}/root/tmp", f"{root}/tmp"):  # noqa: S108 - not trusted
        try:
            fd = _open_in(directory, f"perf-{pid}.map")
        except FileNotFoundError:
            continue
        except OSError as error:
            refusal = error
            continue
        status = os.fstat(fd)
        is_own = (
            stat.S_ISREG(status.st_mode)
            and status.st_uid in (owner, 0)
            and not status.st_mode & stat.S_IWOTH
            and status.st_mtime_ns >= clock.to_unix_ns(began_ns) - _FILE_TIME_NS
        )
        if is_own and read_start_ticks(files, process.tgid) == began_ns // TICK_NS:
            return fd
        os.close(fd)
        refusal = PermissionError(f"the perf map of process {process.tgid} is not its own")
    raise refusal


def _open_in(directory: str, name: str) -> int:
    """Open a file without following links, or waiting for the other end of a pipe."""
    parent = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=parent)
    finally:
        os.close(parent)


def _parse_status(status: bytes) -> tuple[int, int]:
    """Effective user, and pid in the process's own namespace (proc_pid_status(5))."""
    fields = dict(line.split(b":", 1) for line in status.splitlines() if b":" in line)
    try:
        return int(fields[b"Uid"].split()[1]), int(fields[b"NSpid"].split()[-1])
    except (KeyError, ValueError, IndexError) as error:
        raise FileNotFoundError("the status of a process is not readable") from error
