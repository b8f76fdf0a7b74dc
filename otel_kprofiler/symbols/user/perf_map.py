"""Reads JIT-compiled functions from ``/tmp/perf-PID.map``, written for perf(1).

Each function has a line ``START SIZE NAME``, with hexadecimal numbers (Linux's
tools/perf/Documentation/jit-interface.txt). Writers include V8 (``--perf-basic-prof``), Python
(``-X perf``), .NET, Erlang, and the JVM (``Compiler.perfmap``).

Lines have no timestamps, and code memory is reused. The name of an address at a given time is
determined by these rules:

- An address has no name at times after the last read of the file.
- An address that is listed for only one function has that function's name.
- If the function at an address changed between two reads, the address resolves to the old name
  until the first read, to the new name from the second read on, and to no name in between.

New code never has an old name if the writer lists each function before its first call, as all
writers named above do. Until a writer flushes buffered lines, old names may be shown. Old names
also persist if unlisted code replaces freed code.
"""

import os
import re
from typing import Final

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import HostFiles
from otel_kprofiler.model import ProcessKey
from otel_kprofiler.symbols.user.jit_file import (
    ADDRESS_LIMIT,
    MAX_NAME_BYTES,
    JitFile,
    Parsed,
    is_only_of,
    is_running,
    read_writer,
)
from otel_kprofiler.symbols.user.jit_table import MAX_CODE_BYTES, JitCode

_LONGEST_LINE: Final = 64 * 1024
_TAIL_BYTES: Final = 256  # bytes compared to detect a rewritten file
_FILE_TIME_NS: Final = 20_000_000  # file timestamps have the resolution of a kernel tick
_LINE: Final = re.compile(
    rb"^(?:0x)?([0-9a-fA-F]{1,16})[ \t]+(?:0x)?([0-9a-fA-F]{1,16})[ \t]+([^\n]+)$", re.MULTILINE
)


def parse_perf_map(text: bytes) -> list[JitCode]:
    """Returns the functions in complete lines, skipping malformed lines and empty functions."""
    codes = []
    for start_digits, size_digits, name in _LINE.findall(text):
        start, size = int(start_digits, 16), int(size_digits, 16)
        name = name[:MAX_NAME_BYTES].strip()  # noqa: PLW2901 - without its end of line
        if name and 0 < size <= MAX_CODE_BYTES and start + size <= ADDRESS_LIMIT:
            codes.append(JitCode(start, start + size, name))
    return codes


class PerfMap(JitFile[JitCode]):
    """The perf map of one process. Thread-safe, but only one thread may ``update`` it.

    The map of a later process with the same pid is not read. ``root`` is where the host's root
    directory is mounted; empty for ``/``.
    """

    def __init__(self, process: ProcessKey, files: HostFiles, clock: Clock, root: str = "") -> None:
        super().__init__(process, files)
        self._clock, self._root = clock, root

    def _open_file(self) -> int:
        """Open the map in the process's view of ``/tmp``, or otherwise in the host's ``/tmp``.

        The host's ``/tmp`` names maps by the host's pids, so it is not searched for a process that
        has another pid in its own namespace.

        Raises ``OSError`` unless the map is a regular file that is owned by the process's user or
        root, not world-writable, and written since the process started.
        """
        process, root = self._process, self._root
        writer = read_writer(process, self._files)
        began_ns = self._clock.to_unix_ns(process.start_time_ns or 0)
        refusal: OSError = FileNotFoundError(f"process {process.tgid} has no perf map")
        directories = [f"{root}/proc/{process.tgid}/root/tmp"]
        if writer.pid == process.tgid:
            directories.append(f"{root}/tmp")  # noqa: S108 - not trusted
        for directory in directories:
            try:
                fd = _open_in(directory, f"perf-{writer.pid}.map")
            except FileNotFoundError:
                continue
            except OSError as error:
                refusal = error
                continue
            status = os.fstat(fd)
            is_new = status.st_mtime_ns >= began_ns - _FILE_TIME_NS
            if is_only_of(writer, status) and is_new and is_running(process, self._files):
                return fd
            os.close(fd)
            refusal = PermissionError(
                f"the perf map of process {process.tgid} is outdated, or is writable by other users"
            )
        raise refusal

    def _parse(self, text: bytes, left: int) -> Parsed[JitCode]:
        used = text.rfind(b"\n") + 1
        if not used and len(text) > _LONGEST_LINE:  # the next chunk begins inside this line
            return Parsed((), len(text))
        return Parsed(parse_perf_map(text[:used]), used)

    def _apply(self, event: JitCode, now_ns: int) -> None:
        self._add(event, now_ns)

    def _set_mark(self, text: bytes) -> None:
        self._mark = (self._mark + text)[-_TAIL_BYTES:]
        self._mark_at = self._offset - len(self._mark)


def _open_in(directory: str, name: str) -> int:
    """Open a file without following links, and without blocking on a named pipe."""
    parent = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=parent)
    finally:
        os.close(parent)
