"""Names runtime-generated code of a process using its jitdump and perf map."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import MemoryMapping, ReferableFiles, parse_mappings, read_maps
from otel_kprofiler.model import Line, ProcessKey
from otel_kprofiler.symbols.user.file import NamedAddress
from otel_kprofiler.symbols.user.jit_file import JitFile, MadeFunction
from otel_kprofiler.symbols.user.jitdump import JitDump
from otel_kprofiler.symbols.user.perf_map import PerfMap

LOOK_AGAIN_NS: Final = 5_000_000_000
"""Interval between searches for a missing file."""
CHECK_NS: Final = 1_000_000_000
"""Interval between checks for unmapped memory."""
Range = tuple[int, int]
"""Runtime addresses ``[start, end)``."""
_MEMORY: Final = ("/memfd:", "/dev/")
"""Path prefixes of files that JIT compilers map twice: to write code and to execute it."""


class ProcessCode:
    """Runtime-generated code in one process. Thread-safe, but only one thread may call ``update``.

    The jitdump takes precedence over the perf map, because jitdump records have timestamps. A name
    is valid until its code is unmapped, or a file is mapped over the code.
    """

    def __init__(self, process: ProcessKey, files: ReferableFiles, clock: Clock) -> None:
        self._dump = JitDump(process, files)
        self._map = PerfMap(process, files, clock)
        self._files: tuple[JitFile[Any], ...] = (self._dump, self._map)
        self._look_ns = dict.fromkeys(self._files, 0)  # when to search for a missing file again
        self._read_ns = -1
        self._process, self._host = process, files
        self._memory: list[Range] = []
        self._checked_ns = -CHECK_NS

    def update(self, now_ns: int) -> bool:
        """Reads new data from the jitdump and the perf map; see :meth:`JitFile.update`.

        Raises ``OSError`` if there is neither a perf map nor a jitdump.
        """
        has_more = False
        missing: OSError | None = None
        for file in self._files:
            if now_ns < self._look_ns[file]:
                continue
            try:
                has_more |= file.update(now_ns)
                self._look_ns[file] = 0
            except OSError as error:
                missing = error
                self._look_ns[file] = now_ns + LOOK_AGAIN_NS
        if missing and all(self._look_ns.values()):
            self._look_ns = dict.fromkeys(self._files, 0)  # the caller waits before it calls again
            raise missing
        if not has_more:
            if now_ns >= self._checked_ns + CHECK_NS:
                with suppress(OSError):  # an exited process has no mappings
                    self._end_unmapped(now_ns)
            self._read_ns = now_ns
        return has_more

    def _end_unmapped(self, now_ns: int) -> None:
        mappings = parse_mappings(read_maps(self._host, self._process.tgid))
        memory = find_memory(mappings)
        if not memory:
            return
        for start, end in subtract(self._memory, memory):
            for file in self._files:
                file.end_in(start, end, self._checked_ns)
        self._memory, self._checked_ns = memory, now_ns

    def lookup(self, address: int, at_ns: int) -> MadeFunction | None:
        """Returns the function at an address; see :meth:`JitFile.lookup`."""
        if self._dump.has_code_at(address):
            return self._dump.lookup(address, at_ns)
        return self._map.lookup(address, at_ns)

    @property
    def read_ns(self) -> int:
        """Returns the ``CLOCK_BOOTTIME`` at which the last complete read began; -1 if none."""
        return self._read_ns

    @property
    def nbytes(self) -> int:
        """Returns the approximate memory used by the code in the perf map and the jitdump."""
        return sum(file.nbytes for file in self._files)

    def close(self) -> None:
        """Close the files. Functions that have already been read can still be looked up."""
        for file in self._files:
            file.close()


def make_named(function: MadeFunction) -> NamedAddress:
    """Converts a function to a :class:`NamedAddress`."""
    line = Line(function.name, file=function.file, line=function.line)
    return NamedAddress((line,), function.start, None)


def find_memory(mappings: Iterable[MemoryMapping]) -> list[Range]:
    """Returns the mapped ranges that are not backed by a file on disk. Merges adjacent ranges.

    Ignores permissions, because JIT compilers change permissions while they write code. Mappings
    must be sorted.
    """
    ranges: list[Range] = []
    for mapping in mappings:
        if (
            mapping.path.startswith("/")
            and not mapping.deleted
            and not mapping.path.startswith(_MEMORY)
        ):
            continue
        if ranges and ranges[-1][1] == mapping.start:
            ranges[-1] = ranges[-1][0], mapping.end
        else:
            ranges.append((mapping.start, mapping.end))
    return ranges


def subtract(ranges: Iterable[Range], others: list[Range]) -> Iterator[Range]:
    """Yields the parts of ``ranges`` outside ``others``; both must be sorted and disjoint."""
    at = 0
    for start, end in ranges:
        while at < len(others) and others[at][1] <= start:
            at += 1
        following = at
        while start < end and following < len(others) and others[following][0] < end:
            if start < others[following][0]:
                yield start, others[following][0]
            start = others[following][1]  # noqa: PLW2901 - what is left of it
            following += 1
        if start < end:
            yield start, end
