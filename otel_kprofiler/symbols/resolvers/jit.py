"""Code that processes make at run time, by the maps that their compilers write for perf(1)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import HostFiles
from otel_kprofiler.model import USER_SIDE, Frame, Line, ProcessKey
from otel_kprofiler.symbols.user.perf_map import PerfMap

MAX_MAPS: Final = 64
"""Processes whose maps are kept."""


class MadeCode:
    """Names code in memory without a file. Not thread-safe.

    Args:
        files: files of the host.
    """

    def __init__(self, files: HostFiles) -> None:
        self._files = files
        self._clock = Clock()
        self._maps: OrderedDict[ProcessKey, PerfMap] = OrderedDict()

    def frame(self, process: ProcessKey, address: int) -> Frame | None:
        """What is at an address now; None if the process has not told."""
        perf_map = self._maps.get(process)
        if perf_map is None:
            perf_map = self._maps[process] = PerfMap(process, self._files, self._clock)
            while len(self._maps) > MAX_MAPS:
                self._maps.popitem(last=False)[1].close()
        self._maps.move_to_end(process)
        now_ns = self._clock.boot_ns()
        try:
            while perf_map.update(now_ns):
                pass
        except OSError:  # it has none, or one that others could have written
            return None
        function = perf_map.lookup(address, now_ns)
        if function is None:
            return None
        return Frame(None, address, (Line(function.name),), address - function.start, USER_SIDE)

    def close(self) -> None:
        """Forget all maps."""
        while self._maps:
            self._maps.popitem()[1].close()
