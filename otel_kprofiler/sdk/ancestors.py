"""Whether a profiler samples this process from above, so that nothing is counted twice."""

from __future__ import annotations

import os
from typing import Final

from otel_kprofiler.model import Attributes
from otel_kprofiler.processes import read_process_context

_TARGET: Final = "otel_kprofiler.target"
SAMPLES_DESCENDANTS: Final[Attributes] = {_TARGET: "children"}
"""What a process says in its context, beside its Resource, while it samples its descendants."""


def find_sampling_ancestor() -> int | None:
    """The process among the ancestors that samples all of its descendants, if there is one.

    It is known by its process context: this process must be allowed to read it, and share its
    pid namespace.
    """
    pid = os.getppid()
    while pid > 1:
        context = read_process_context(pid)
        if context is not None and context.extra.items() >= SAMPLES_DESCENDANTS.items():
            return pid
        pid = _read_parent(pid)
    return None


def _read_parent(pid: int) -> int:
    """The parent of a process, 0 if it is not known; field 4 of proc_pid_stat(5)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0  # it has ended meanwhile
