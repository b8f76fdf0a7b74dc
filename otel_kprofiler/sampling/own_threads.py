"""Identifies the profiler's own threads, whose waits are excluded."""

import os
import threading
from typing import Final

_OWN_NAME: Final = "kprofiler-"
"""Name prefix for this package's threads."""


class OwnThreads:
    """The threads of this process whose waits are excluded; not thread-safe.

    For ``leaves_out``, see :class:`OffCpuConfig`.
    """

    def __init__(self, leaves_out: str) -> None:
        self._leaves_out = leaves_out
        self._pid = os.getpid()
        self._tids: set[int | None] = set()

    def update(self) -> None:
        """Add the profiling threads that have started since the last call.

        Exited threads remain in the set, because records of their waits may still arrive.
        """
        if self._leaves_out == "threads":
            self._tids |= {
                thread.native_id
                for thread in threading.enumerate()
                if thread.name.startswith(_OWN_NAME)
            }

    def has(self, tgid: int, tid: int) -> bool:
        """Returns whether a thread's waits are excluded."""
        if tgid != self._pid or not self._leaves_out:
            return False
        return self._leaves_out == "process" or tid in self._tids
