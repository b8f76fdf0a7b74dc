"""Calls functions that read processes, but waits for none whose memory hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from otel_kprofiler.host import MAX_LEFT, PATIENCE_S, HostFiles, PatientCalls, read_owner
from otel_kprofiler.model import ProcessKey

MAX_OF_USER: Final = MAX_LEFT // 2
"""Processes of a user that may hang at a time; above it, no other of them is read."""


class HangingProcesses:
    """Leaves a thread to each process that hangs, up to a limit; for one calling thread.

    At the limit, it skips processes, since a process that hangs then would hold the caller.

    Args:
        files: files of the host.
        name: of the threads.
        patience_s: as of :class:`PatientCalls`, in seconds.
    """

    def __init__(self, files: HostFiles, name: str, patience_s: float = PATIENCE_S) -> None:
        self._files = files
        self._calls = PatientCalls(name, patience_s)
        self._users: dict[ProcessKey, int | None] = {}  # of processes that hang

    def call(self, key: ProcessKey, job: Callable[[], None]) -> bool:
        """Call a function that reads a process.

        Returns:
            Whether it was called. Otherwise the process hangs, or too many others do.
        """
        self._users = {
            left: self._users[left] for left in self._users if self._calls.has_left(left)
        }
        user = read_owner(self._files, key.tgid)
        users = list(self._users.values())
        if key in self._users or len(users) >= MAX_LEFT or users.count(user) >= MAX_OF_USER:
            return False
        if not self._calls.call(key, job):
            self._users[key] = user
        return True

    def stop(self) -> list[threading.Thread]:
        """Let all threads end; returns them, to be joined."""
        return self._calls.stop()
