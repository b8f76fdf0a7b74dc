"""The profiler's own threads, whose waits are left out."""

from __future__ import annotations

import os
import threading
from typing import Final

_OWN_NAME: Final = "kprofiler-"
"""How the names of all threads of this package begin."""


class OwnThreads:
    """The threads of this process that are left out; not thread-safe.

    Args:
        leaves_out: as in :class:`OffCpuConfig`.
    """

    def __init__(self, leaves_out: str) -> None:
        self._leaves_out = leaves_out
        self._pid = os.getpid()
        self._tids: set[int | None] = set()

    def update(self) -> None:
        """Look which threads there are; one that has ended stays, as records of it may come."""
        if self._leaves_out == "threads":
            self._tids |= {
                one.native_id for one in threading.enumerate() if one.name.startswith(_OWN_NAME)
            }

    def has(self, tgid: int, tid: int) -> bool:
        """Returns whether a thread is left out."""
        if tgid != self._pid or not self._leaves_out:
            return False
        return self._leaves_out == "process" or tid in self._tids
