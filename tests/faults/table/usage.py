"""Measures the memory and CPU time used by an agent and its children."""

from __future__ import annotations

import contextlib
import os
import threading
import time

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
EVERY_S = 0.1


def _children(pid: int) -> list[int]:
    """Returns the pids of a process's descendants."""
    results = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                results += [int(word) for word in file.read().split()]
    return results + [below for child in results for below in _children(child)]


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process, plus its children's private memory."""
    total = 0
    for one in [pid, *_children(pid)]:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{one}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
            total += (resident if one == pid else resident - shared) * PAGE
    return total


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process and all its children, including exited ones."""
    total = 0
    for one in [pid, *_children(pid)]:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{one}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            total += sum(map(int, fields[11:15] if one == pid else fields[11:13]))
    return total / TICKS


class Peak:
    """Tracks the peak memory of processes by reading it ten times a second."""

    def __init__(self):
        self.bytes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def add(self, pid: int) -> None:
        with self._lock:
            self.bytes[pid] = resident_bytes(pid)

    def stop(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.is_set():
            with self._lock:
                pids = list(self.bytes)
            for pid in pids:
                self.bytes[pid] = max(self.bytes[pid], resident_bytes(pid))
            time.sleep(EVERY_S)
