"""Increases the timer slack of polling threads that libraries start."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from otel_kprofiler.host.libc import prctl

SLACK_NS: Final = 100_000_000
"""Increased timer slack in nanoseconds. Linux's default is 50,000 ns."""

_PR_SET_TIMERSLACK: Final = 29  # include/uapi/linux/prctl.h
_PR_GET_TIMERSLACK: Final = 30


@contextmanager
def coarse_timers() -> Iterator[None]:
    """Increase the timer slack of threads started in the context by this thread or its descendants.

    The kernel may then coalesce timers, which expire up to :data:`SLACK_NS` late
    (PR_SET_TIMERSLACK(2const)). I/O and signals still wake the threads immediately. This thread's
    slack is restored when the context exits. Threads that already have a larger slack keep it.
    Real-time threads have no timer slack.
    """
    try:
        former_ns = prctl(_PR_GET_TIMERSLACK)
        is_coarser = 0 < former_ns < SLACK_NS  # 0 for real-time threads
        if is_coarser:
            prctl(_PR_SET_TIMERSLACK, SLACK_NS)
    except OSError:  # denied by a sandbox: timers remain exact
        is_coarser = False
    try:
        yield
    finally:
        if is_coarser:
            prctl(_PR_SET_TIMERSLACK, former_ns)
