"""Runs :mod:`otel_kprofiler.unwinding.index` in a process with limits on time and memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

from otel_kprofiler.model import Segment
from otel_kprofiler.unwinding import index
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused
from otel_kprofiler.unwinding.table import ENTRY_BYTES, MAX_ENTRIES, Tables, check_pairs

MAX_FRAMES_BYTES: Final = 64 << 20
TIMEOUT_S: Final = 30.0
"""Limit in wall-clock time, for a machine that is busy: CPU time has its own."""
_SHOWN: Final = 200


def index_frames(fd: int, frames: Segment, timeout_s: float = TIMEOUT_S) -> Tables:
    """Make the search table of ``.eh_frame``; blocks until the process has ended.

    Args:
        fd: the file, open for reading.
        frames: where the section is.
        timeout_s: after which the process is killed.

    Raises:
        TableRefused: the section is damaged or too large, or the process exceeded a limit.
        OSError: no process could be started.
    """
    if frames.size > MAX_FRAMES_BYTES:
        raise TableRefused(Refusal.TOO_LARGE, f".eh_frame of {frames.size} bytes")
    arguments = map(str, (frames.offset, frames.size, frames.address))
    try:
        done = subprocess.run(  # its output is at most half as long as the section
            [sys.executable, "-I", "-S", index.__file__, *arguments],
            stdin=fd,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TableRefused(Refusal.NOT_INDEXED, f"took over {timeout_s:g} s") from error
    if done.returncode:
        cause = done.stdout[:_SHOWN].decode("utf-8", "replace")
        raise TableRefused(Refusal.NOT_INDEXED, cause or f"status {done.returncode}")
    entries = len(done.stdout) // ENTRY_BYTES
    if not entries:
        raise TableRefused(Refusal.NO_FRAMES, ".eh_frame has no entries")
    if entries > MAX_ENTRIES:
        raise TableRefused(Refusal.TOO_LARGE, f"{entries} functions")
    check_pairs(iter([done.stdout]))
    return Tables(frames.address, None, entries, frames, done.stdout)
