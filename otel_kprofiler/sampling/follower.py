"""Follows processes and all their descendants, and knows when the last of them has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from otel_kprofiler.host import HostFiles, find_descendants, read_process, read_processes

_SCAN_INTERVAL_S: Final = 1.0
_MOST: Final = 1000
"""Limit of processes followed by their ids; the program finds others by their ancestors."""


class ProcessFollower:
    """Finds the descendants of processes, also those whose parents end before they do.

    The program finds descendants by their ancestors; this adds those to the targets that may lose
    them. A process that starts and loses its parent within a second can be missed.

    Args:
        files: this host's.
        pids: the processes to follow.
        monotonic: the clock, in seconds.

    Attributes:
        pids: those that run, and their descendants.
    """

    def __init__(
        self, files: HostFiles, pids: Iterable[int], monotonic: Callable[[], float]
    ) -> None:
        self._files = files
        self._monotonic = monotonic
        self._next_scan_s = 0.0
        self._started = {
            pid: found.start_ticks for pid in pids if (found := read_process(files, pid))
        }
        self.look()

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes that ran at the last look."""
        return tuple(self._started)

    def look(self) -> bool:
        """Look at ``/proc``; returns whether :attr:`pids` has changed."""
        before = set(self._started)
        self._started = {
            pid: ticks for pid, ticks in self._started.items() if self._runs(pid, ticks)
        }
        now = self._monotonic()
        if self._started and now >= self._next_scan_s:
            self._next_scan_s = now + _SCAN_INTERVAL_S
            processes = read_processes(self._files)
            found = sorted(find_descendants(processes, self._started))
            for pid in found[: _MOST - len(self._started)]:
                self._started[pid] = processes[pid].start_ticks
        return set(self._started) != before

    def _runs(self, pid: int, ticks: int) -> bool:
        found = read_process(self._files, pid)
        return found is not None and found.start_ticks == ticks
