"""Finds an ancestor that already samples this process, so that nothing is counted twice."""

import logging
import os
from typing import Final

from otel_kprofiler.host import Access, read_stat
from otel_kprofiler.model import Attributes
from otel_kprofiler.processes import TARGET, read_process_context

SAMPLES_DESCENDANTS: Final[Attributes] = {TARGET: "children"}
"""Extra attributes in the process context of any process that samples its descendants."""


_log = logging.getLogger(__name__)


def describe_sampling_ancestor() -> str:
    """Logs and returns which ancestor samples this process; "" if no ancestor does."""
    pid = find_sampling_ancestor()
    if pid is None:
        return ""
    ancestor = f"sampled by process {pid} (target children)"
    _log.info("kernel profiler not started: %s", ancestor)
    return ancestor


def find_sampling_ancestor() -> int | None:
    """Returns the pid of the nearest ancestor that samples its descendants; None if not found.

    An ancestor that samples its descendants publishes :data:`SAMPLES_DESCENDANTS` in its process
    context. This process must be allowed to read the ancestor's context, and must be in the same
    pid namespace.
    """
    pid, files = os.getppid(), Access()
    while pid > 1:
        context = read_process_context(pid)
        if context is not None and context.extra.items() >= SAMPLES_DESCENDANTS.items():
            return pid
        stat = read_stat(files, pid)
        pid = stat.parent if stat else 0  # 0: the process has exited
    return None
