"""Tracks processes and all their descendants until the last process has exited."""

from collections.abc import Callable, Iterable
from typing import Final

from otel_kprofiler.host import HostFiles, find_descendants, read_process, read_processes
from otel_kprofiler.sampling.target_maps import SLOTS

_SCAN_INTERVAL_S: Final = 1.0
_MOST: Final = SLOTS // 2
"""Maximum number of targets: the map contains old and new targets while they are replaced. The BPF
program also samples descendants beyond this limit."""


class ProcessFollower:
    """Finds the descendants of processes, even if their parents exit first.

    The BPF program finds descendants by walking up each process's chain of parents. This class also
    adds each descendant to the targets, because the chain is broken if an ancestor exits. A process
    whose parent exits within a second of the process's start may be missed.
    """

    def __init__(
        self, files: HostFiles, pids: Iterable[int], monotonic: Callable[[], float]
    ) -> None:
        self._files = files
        self._monotonic = monotonic
        self._next_scan_s = 0.0
        self._started = {
            pid: process.start_ticks for pid in pids if (process := read_process(files, pid))
        }
        self.look()

    @property
    def pids(self) -> tuple[int, ...]:
        """Returns the processes that were running at the last scan."""
        return tuple(self._started)

    def look(self) -> bool:
        """Scan ``/proc`` if a scan is due, and return whether :attr:`pids` has changed."""
        previous = set(self._started)
        self._started = {
            pid: ticks for pid, ticks in self._started.items() if self._runs(pid, ticks)
        }
        now = self._monotonic()
        if self._started and now >= self._next_scan_s:
            self._next_scan_s = now + _SCAN_INTERVAL_S
            processes = read_processes(self._files)
            descendants = sorted(find_descendants(processes, self._started))
            for pid in descendants[: max(0, _MOST - len(self._started))]:
                self._started[pid] = processes[pid].start_ticks
        return set(self._started) != previous

    def _runs(self, pid: int, ticks: int) -> bool:
        process = read_process(self._files, pid)
        return process is not None and process.start_ticks == ticks
