"""SIGTERM: export what is left first, then let the signal do what it would have done."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

_JOIN_S: Final = 3.0

_log = logging.getLogger(__name__)


class _Handler:
    """Comes before the handler, or the default action, that was there.

    Exporting happens in a thread: the main thread, where handlers run, may hold any lock.
    """

    def __init__(self, before: Any, flush: Callable[[], object], end: Callable[[], object]) -> None:
        self._before = before
        self._flush = flush
        self._end = end

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            _start(self._flush)
            self._before(number, frame)
        elif os.getpid() == 1:
            _start(self._flush)  # to the first process of a container, nothing happens by default
        else:
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
            ending = _start(self._end)
            if ending is not None:
                ending.join(_JOIN_S)
            signal.raise_signal(number)


def _start(task: Callable[[], object]) -> threading.Thread | None:
    thread = threading.Thread(target=task, name="kprofiler-sigterm", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter is ending: atexit exports
        thread.start()
        return thread
    return None


def come_before_sigterm(*, flush: Callable[[], object], end: Callable[[], object]) -> None:
    """Export before SIGTERM does what it does now; once in a process, and in its forked children.

    Args:
        flush: called where a handler of the service decides what happens.
        end: called where the process ends.

    Raises:
        ValueError: this is not the main thread of the main interpreter.
    """
    before = signal.getsignal(signal.SIGTERM)
    if isinstance(before, _Handler) or before is signal.SIG_IGN:
        return
    if before is None:
        _log.warning("SIGTERM is handled by other than Python code: nothing is exported before it")
        return
    signal.signal(signal.SIGTERM, _Handler(before, flush, end))
