"""Code that one process makes at run time: by its jitdump, or else by its perf map."""

from __future__ import annotations

from typing import Any

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import ReferableFiles
from otel_kprofiler.model import Line, ProcessKey
from otel_kprofiler.symbols.user.file import NamedAddress
from otel_kprofiler.symbols.user.jit_file import JitCounts, JitFile, MadeFunction
from otel_kprofiler.symbols.user.jitdump import JitDump
from otel_kprofiler.symbols.user.perf_map import PerfMap


class ProcessCode:
    """Code of one process. Thread-safe; ``update`` is for one thread.

    Of two files, the jitdump counts, since it tells times. The one that was found first is kept to.

    Args:
        process: with its start time.
        files: files of the host.
        clock: to compare times of files.
    """

    def __init__(self, process: ProcessKey, files: ReferableFiles, clock: Clock) -> None:
        self._dump = JitDump(process, files)
        self._map = PerfMap(process, files, clock)
        self._used: JitFile[Any] | None = None

    def update(self, now_ns: int) -> bool:
        """As :meth:`JitFile.update`."""
        if self._used is None:
            try:
                has_more = self._dump.update(now_ns)
            except OSError:
                has_more = self._map.update(now_ns)
                self._used = self._map
            else:
                self._used = self._dump
            return has_more
        return self._used.update(now_ns)

    def lookup(self, address: int, at_ns: int) -> MadeFunction | None:
        """As :meth:`JitFile.lookup`."""
        return self._file.lookup(address, at_ns)

    @property
    def read_ns(self) -> int:
        """As :attr:`JitFile.read_ns`."""
        return self._file.read_ns

    def counts(self) -> JitCounts:
        """As :meth:`JitFile.counts`."""
        return self._file.counts()

    def close(self) -> None:
        """Close the files; what is known remains."""
        self._dump.close()
        self._map.close()

    @property
    def _file(self) -> JitFile[Any]:
        return self._used or self._map


def make_named(function: MadeFunction) -> NamedAddress:
    """A function as frames have it."""
    line = Line(function.name, file=function.file, line=function.line)
    return NamedAddress((line,), function.start, None)
