"""Reads JIT-compiled functions and their lines from ``jit-PID.dump``, written for perf(1).

The format is specified in Linux's tools/perf/Documentation/jitdump-specification.txt. Writers
include V8 (``--perf-prof``), OpenJDK (perf's libperf-jvmti), LLVM's perf listener, .NET, and
wasmtime. A process's jitdump is read only if the process has mapped it.

A name is valid from the timestamp of its record until other code is recorded at its address, the
code moves, or the compiler closes or unmaps the file. Timestamps are from ``CLOCK_MONOTONIC``,
which stops while the host is suspended. If the host was suspended after the last read, a timestamp
converted to boottime may be too late by the length of the suspension. To be safe, the old name of
replaced code expires earlier by the length of the suspension. If a file uses a clock other than
``CLOCK_MONOTONIC``, its records take effect when they are read.

Compilers that buffer their output, such as V8, write their latest functions with a delay. Until a
function's record has been written, lookups at its address return the previous function's name.
"""

import struct
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from otel_kprofiler.clock import suspended_ns
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.host import (
    FileRequest,
    HostFiles,
    ReferableFiles,
    open_mapped,
    parse_mappings,
    read_maps,
)
from otel_kprofiler.model import FileKey, ProcessKey
from otel_kprofiler.symbols.user.jit_file import (
    ADDRESS_LIMIT,
    MAX_NAME_BYTES,
    JitFile,
    MadeFunction,
    Parsed,
    is_only_of,
    is_running,
    read_writer,
)
from otel_kprofiler.symbols.user.jit_table import MAX_CODE_BYTES, JitCode

MAX_SOURCE_BYTES: Final = 1 << 20
"""Memory limit for a process's source file names; further names are dropped."""
_MAGIC: Final = 0x4A695444
_HEADER: Final = struct.Struct("=IIIIIIQQ")
_OTHER_CLOCK: Final = 1  # JITDUMP_FLAGS_ARCH_TIMESTAMP
_RECORD: Final = struct.Struct("=IIQ")
_LOAD, _MOVE, _LINES, _CLOSE = 0, 1, 2, 3
_CODE: Final = struct.Struct("=IIQQQQ")
_MOVED: Final = struct.Struct("=IIQQQQQ")
_TABLE: Final = struct.Struct("=QQ")
_ENTRY: Final = struct.Struct("=QII")
_SAME_FILE: Final = b"\xff"
_V8_PADDING: Final = 0xDEADBEEF
_V8_SHIFT: Final = 64
"""V8 shifts line addresses as if an ELF header preceded the code, as perf once expected."""
_V8_ALIGNMENT: Final = 8
_PLACE: Final = struct.Struct("=III")  # offset in the function, line, file


class Loaded(NamedTuple):
    """A record of loaded code; ``time_ns`` is the record's timestamp."""

    time_ns: int
    code: JitCode


class Moved(NamedTuple):
    """A record of code that moved from ``old`` to ``new``; ``size`` is the code's size in bytes."""

    time_ns: int
    old: int
    new: int
    size: int


class Closed(NamedTuple):
    """The record that marks the end of a file. Code in the file does not run after this record."""

    time_ns: int


Record = Loaded | Moved | Closed


class NotADumpError(OSError):
    """Raised for a file that is not a jitdump of the process."""


class JitDumpParser:
    """Parses a file in chunks, from its start.

    Attributes:
        pid: pid of the process in its pid namespace; records of its children are skipped.
        header: the file's header; empty until it is parsed.
        has_other_clock: whether timestamps are from a clock other than ``CLOCK_MONOTONIC``.
        sources: names of source files by number; 0 means no file.
    """

    def __init__(self, pid: int = 0) -> None:
        self.pid = pid
        self.sources = [""]
        self._nbytes = 0
        self._numbers = {b"": 0}
        self.begin()

    def begin(self) -> None:
        """Start parsing the process's new jitdump. Existing source file numbers remain valid."""
        self.header = b""
        self.has_other_clock = False
        self._shift = 0
        self._lines = b""  # payload of the debug info record that precedes the next code record

    @property
    def nbytes(self) -> int:
        """Returns the memory used by source file names and the line table of the next record."""
        return self._nbytes + len(self._lines)

    def parse(self, text: bytes, left: int) -> Parsed[Record]:
        """Parse the next chunk: the bytes after the last byte consumed.

        ``left`` is the number of bytes left in the file, including ``text``. Raises
        ``NotADumpError`` if the header is invalid.
        """
        records: list[Record] = []
        at = 0 if self.header else self._parse_header(text)
        while self.header and at + _RECORD.size <= len(text):
            kind, size, time_ns = _RECORD.unpack_from(text, at)
            if size < _RECORD.size or at + size > left:
                break  # incomplete or malformed: later records cannot be located
            end = min(at + size, len(text))
            if at and end < at + size:
                break
            with suppress(struct.error, ValueError):  # the record is malformed
                record = self._parse_record(kind, time_ns, text, at + _RECORD.size, end)
                records += [record] if record else []
            at += size
        return Parsed(records, at)

    def _parse_header(self, text: bytes) -> int:
        """Returns the file offset of the first record; 0 until the header is read."""
        if len(text) < _HEADER.size:
            return 0
        magic, _, size, _, padding, pid, _, flags = _HEADER.unpack_from(text)
        if magic != _MAGIC or pid != self.pid or not _HEADER.size <= size <= len(text):
            raise NotADumpError(f"the file is not a jitdump from process {self.pid}")
        self.header = text[: _HEADER.size]
        self.has_other_clock = bool(flags & _OTHER_CLOCK)
        self._shift = _V8_SHIFT if padding == _V8_PADDING else 0
        return int(size)

    def _parse_record(
        self, kind: int, time_ns: int, text: bytes, at: int, end: int
    ) -> Record | None:
        if kind == _LINES:
            self._lines = text[at:end]
        elif kind == _CLOSE:
            return Closed(time_ns)
        elif kind == _LOAD:
            pid, _, _, start, size, _ = _CODE.unpack_from(text, at)
            at += _CODE.size
            name = text[at : min(end, at + MAX_NAME_BYTES)].partition(b"\0")[0]
            body, self._lines = self._lines, b""
            _check(start, size)
            if pid == self.pid and size:
                code = JitCode(start, start + size, name)
                with suppress(struct.error, ValueError):  # malformed: the function gets no lines
                    code = code._replace(lines=self._parse_lines(body, code))
                return Loaded(time_ns, code)
        elif kind == _MOVE:
            pid, _, _, old, new, size, _ = _MOVED.unpack_from(text, at)
            _check(new, size)
            if pid == self.pid and size:
                return Moved(time_ns, old, new, size)
        return None

    def _parse_lines(self, body: bytes, code: JitCode) -> bytes:
        """Returns packed ``_PLACE`` entries, sorted by offset; empty if the record is invalid."""
        if not body:
            return b""
        start, count = _TABLE.unpack_from(body)
        size = code.end - code.start
        entries = (self._shift and _split_evenly(body, count, code.name)) or _split(body, count)
        lines = [(at - start - self._shift, line, self._number(file)) for at, line, file in entries]
        if start != code.start or any(not 0 <= offset <= size for offset, _, _ in lines):
            return b""
        lines.sort(key=lambda entry: entry[0])
        places, last = [], (0, 0)
        for offset, line, file in lines:
            if (line, file) != last:
                last = line, file
                places.append(_PLACE.pack(offset, line, file))
        return b"".join(places)

    def _number(self, name: bytes) -> int:
        number = self._numbers.get(name)
        if number is None:
            size = 2 * len(name) + 200
            if self._nbytes + size > MAX_SOURCE_BYTES:
                return 0
            self._nbytes += size
            number = self._numbers[name] = len(self.sources)
            self.sources.append(name.decode("utf-8", "backslashreplace"))
        return number


_Entry = tuple[int, int, bytes]
"""An address, and the line and file of the code that starts there."""


def _split(body: bytes, count: int) -> list[_Entry]:
    """Parses a debug-info record.

    Raises ``ValueError`` or ``struct.error`` if the data is malformed.
    """
    entries = []
    at, file = _TABLE.size, b""
    for _ in range(min(count, len(body) // _ENTRY.size)):
        address, line, _ = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        end = body.index(b"\0", at)
        if body[at:end] != _SAME_FILE:
            file = body[at : min(end, at + MAX_NAME_BYTES)]
        entries.append((address, line, file))
        at = end + 1
    return entries


def _split_evenly(body: bytes, count: int, name: bytes) -> list[_Entry]:
    """Parses a V8 record in which all entries contain the function's file (``JS:*f a.js:1:13``).

    The source file is parsed from the function's name, because V8 may write file names after
    freeing them. A freed file name is written as garbage of the correct length. Returns an empty
    list if the record's length does not match the file name's length.
    """
    file = name.rpartition(b":")[0].rpartition(b":")[0]
    while file := file.partition(b" ")[2]:
        size = _ENTRY.size + len(file) + 1
        if 0 <= len(body) - _TABLE.size - count * size < _V8_ALIGNMENT:
            starts = range(_TABLE.size, _TABLE.size + count * size, size)
            return [(*_ENTRY.unpack_from(body, at)[:2], file) for at in starts]
    return []


def find_place(lines: bytes, offset: int) -> tuple[int, int]:
    """Returns the file number and line for an offset in a function; zeros if unknown."""
    count = len(lines) // _PLACE.size
    index = bisect_right(range(count), offset, key=lambda row: _place(lines, row)[0]) - 1
    if index < 0:
        return 0, 0
    _, line, file = _place(lines, index)
    return file, line


def _place(lines: bytes, row: int) -> tuple[int, int, int]:
    offset, line, file = _PLACE.unpack_from(lines, row * _PLACE.size)
    return offset, line, file


def _check(start: int, size: int) -> None:
    if size > MAX_CODE_BYTES or start + size > ADDRESS_LIMIT:
        raise ValueError("the code size is out of range")


class JitDump(JitFile[Record]):
    """The jitdump of one process. Thread-safe, but only one thread may ``update`` it.

    Dumps from later processes with the same pid are not read. ``get_suspended_ns`` returns how long
    the host has been suspended since boot.
    """

    def __init__(
        self,
        process: ProcessKey,
        files: ReferableFiles,
        get_suspended_ns: Callable[[], int] = suspended_ns,
    ) -> None:
        super().__init__(process, files)
        self._referable = files
        self._get_suspended_ns = get_suspended_ns
        self._parser = JitDumpParser()
        self._is_mapped = True
        self._shift_ns = 0  # offset of the file's clock from this process's clock
        self._suspended_ns = 0
        self._slack_ns = 0  # duration of host suspends since the last update

    def update(self, now_ns: int) -> bool:
        """Reads new data; see :meth:`JitFile.update`."""
        before_ns, self._suspended_ns = self._suspended_ns, self._get_suspended_ns()
        self._slack_ns = max(0, self._suspended_ns - before_ns)
        last_ns = self._read_ns
        has_more = super().update(now_ns)
        if not has_more and not self._is_mapped:
            with self._lock:
                self._table.end_all(last_ns)
        return has_more

    def _open_file(self) -> int:
        writer = read_writer(self._process, self._files)
        maps = read_maps(self._files, self._process.tgid)
        shift_ns = _read_clock_shift(self._process, self._files)
        if not maps or not is_running(self._process, self._files):
            raise ProcessLookupError(f"process {self._process.tgid} has exited")
        name = f"/jit-{writer.pid}.dump"
        mappings = parse_mappings(maps, only_code=True)
        mapping = next((each for each in mappings if each.path.endswith(name)), None)
        self._is_mapped = mapping is not None
        if mapping is None:
            raise FileNotFoundError(f"process {self._process.tgid} has not mapped a jitdump file")
        pid = self._process.tgid
        key = FileKey(mapping.inode, mapping.device, 0)
        request = FileRequest(key, mapping.start, mapping.end, mapping.file_offset, pid, pid)
        try:
            opened = open_mapped(request, self._referable)
        except KProfilerError as error:
            raise FileNotFoundError(str(error)) from error
        if not is_only_of(writer, opened.status):
            opened.close()
            raise PermissionError(f"the jitdump of process {pid} is writable by other users")
        self._parser.pid = writer.pid
        self._shift_ns = shift_ns
        return opened.fd

    def _parse(self, text: bytes, left: int) -> Parsed[Record]:
        return self._parser.parse(text, left)

    def _apply(self, event: Record, now_ns: int) -> None:
        time_ns = event.time_ns - self._shift_ns + self._suspended_ns
        is_timed = 0 <= time_ns <= now_ns and not self._parser.has_other_clock
        until_ns = time_ns - self._slack_ns - 1 if is_timed else self._read_ns
        if isinstance(event, Closed):
            self._table.end_all(until_ns)
            return
        for code in [event.code] if isinstance(event, Loaded) else self._move(event):
            if is_timed:
                self._table.add(code, since_ns=time_ns, seen_ns=time_ns, gone_ns=until_ns)
            else:
                self._add(code, now_ns)

    def _move(self, record: Moved) -> list[JitCode]:
        """Returns an unnamed entry for the old address, and the function at its new address."""
        code = self._table.last_at(record.old)
        end = record.new + record.size
        if code is None or code.start != record.old:
            return [JitCode(record.new, end, b"")]
        return [code._replace(name=b"", lines=b""), code._replace(start=record.new, end=end)]

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._parser.begin()

    def _set_mark(self, text: bytes) -> None:
        self._mark = self._parser.header

    @property
    def nbytes(self) -> int:
        """Returns the approximate memory used by the functions and their lines."""
        return super().nbytes + self._parser.nbytes

    def _describe(self, code: JitCode, address: int) -> MadeFunction:
        file, line = find_place(code.lines, address - code.start)
        name = super()._describe(code, address)
        return name._replace(file=self._parser.sources[file], line=line) if line else name


def _read_clock_shift(process: ProcessKey, files: HostFiles) -> int:
    """Reads the offset of a process's ``CLOCK_MONOTONIC`` from ours; see time_namespaces(7)."""
    try:
        text = files.read_bytes(f"/proc/{process.tgid}/timens_offsets")
    except FileNotFoundError:  # Linux before 5.5 has no time namespaces
        return 0
    for line in text.splitlines():
        name, *numbers = line.split()
        if name == b"monotonic":
            seconds, ns = map(int, numbers)
            return seconds * 1_000_000_000 + ns
    return 0
