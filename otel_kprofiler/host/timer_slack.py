"""Coarse timers for threads that libraries start, and which poll."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SLACK_NS: Final = 100_000_000
"""How late timers of such threads may fire, in nanoseconds; Linux's default is 50,000."""

_PR_SET_TIMERSLACK: Final = 29  # include/uapi/linux/prctl.h
_PR_GET_TIMERSLACK: Final = 30


@contextmanager
def coarse_timers() -> Iterator[None]:
    """Give threads that this thread starts in the block, and their threads, coarse timers.

    The kernel then lets timers expire together, up to :data:`SLACK_NS` late
    (PR_SET_TIMERSLACK(2const)). I/O and signals of other threads wake them as before. The slack of
    this thread is restored at the end. A greater slack is kept, and a real-time thread has none.
    """
    prctl = ctypes.CDLL(None).prctl
    unused = ctypes.c_ulong(0)
    former_ns = prctl(_PR_GET_TIMERSLACK, unused, unused, unused, unused)
    # 0 is a real-time thread; -1 a sandbox that refuses the call; then timers stay exact.
    if not 0 < former_ns < SLACK_NS:
        yield
        return
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(SLACK_NS), unused, unused, unused)
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(former_ns), unused, unused, unused)
