"""Calls functions that inspect processes, and abandons calls that hang."""

import threading
from collections.abc import Callable
from typing import Final

from otel_kprofiler.host import MAX_LEFT, PATIENCE_S, HostFiles, PatientCalls, read_owner
from otel_kprofiler.model import ProcessKey

MAX_OF_USER: Final = MAX_LEFT // 2
"""If a user has this many hanging processes, the user's other processes are not read."""


class HangingProcesses:
    """Calls functions in threads, and abandons one thread per hanging process, up to a limit.

    For use by a single thread. At the limit, processes are skipped, because one more hanging
    process would block the caller. For ``patience_s``, see :class:`PatientCalls`.
    """

    def __init__(self, files: HostFiles, name: str, patience_s: float = PATIENCE_S) -> None:
        self._files = files
        self._calls = PatientCalls(name, patience_s)
        self._users: dict[ProcessKey, int] = {}  # uids of hanging processes

    def call(self, key: ProcessKey, job: Callable[[], None]) -> bool:
        """Call a function that reads a process, and return whether it was called.

        The function is not called if an earlier call for this process, or too many calls for other
        processes, still hang, or if the process has exited.
        """
        self._users = {
            left: self._users[left] for left in self._users if self._calls.has_left(left)
        }
        user = read_owner(self._files, key.tgid)
        users = list(self._users.values())
        if user is None:
            return False
        if key in self._users or len(users) >= MAX_LEFT or users.count(user) >= MAX_OF_USER:
            return False
        if not self._calls.call(key, job):
            self._users[key] = user
        return True

    def stop(self) -> list[threading.Thread]:
        """Signal all threads to exit, and return the threads for the caller to join."""
        return self._calls.stop()
