"""Exports pending samples on SIGTERM, then allows the signal to take effect."""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

_JOIN_S: Final = 3.0
"""Time limit, in seconds, for an export. 2 s suffice unless the interrupted thread holds a lock."""

_log = logging.getLogger(__name__)


class _Handler:
    """A signal handler that runs before the previous handler or the default action.

    Exports in another thread, because the main thread, which runs the handler, may hold a lock that
    the export needs.
    """

    def __init__(
        self, earlier: Any, flush: Callable[[], object], end: Callable[[], object]
    ) -> None:
        self._before = earlier
        self._flush = flush
        self._end = end
        self._exiting = (
            0  # pid of the process that is exporting at exit; 0 if no process is exporting
        )
        self._arrived = False

    def export_with(self, flush: Callable[[], object], end: Callable[[], object]) -> None:
        """Replace the functions that export samples."""
        self._flush, self._end = flush, end

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._exiting == os.getpid():
            signal.signal(number, self._before)  # a second SIGTERM does not wait for the export
            self._arrived = True
        elif callable(self._before):
            _start(self._flush)
            self._before(number, frame)
        elif os.getpid() == 1:
            _start(self._flush)  # without a handler, pid 1 ignores SIGTERM
        else:
            signal.signal(number, signal.SIG_DFL)  # a second SIGTERM terminates immediately
            ending = _start(self._end)
            if ending is not None:
                ending.join(_JOIN_S)
            signal.raise_signal(number)

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        self._exiting = os.getpid()
        try:
            yield
        finally:
            self._exiting = 0
            if self._arrived:
                signal.raise_signal(signal.SIGTERM)


_installed: _Handler | None = None


def _start(task: Callable[[], object]) -> threading.Thread | None:
    if sys.is_finalizing():  # all samples have been exported, and no thread can start
        return None
    thread = threading.Thread(target=task, name="kprofiler-sigterm", daemon=True)
    # at interpreter exit, no thread can be started, but an atexit handler exports the samples
    with contextlib.suppress(RuntimeError):
        thread.start()
        return thread
    return None


def come_before_sigterm(*, flush: Callable[[], object], end: Callable[[], object]) -> None:
    """Install a handler that exports pending samples before the current SIGTERM action runs.

    The handler calls ``end`` if SIGTERM is going to terminate the process, and ``flush`` otherwise.
    Replaces the functions if the handler is already installed; does nothing if SIGTERM is ignored.
    Forked children inherit the handler. Raises ``ValueError`` outside the main thread of the main
    interpreter.
    """
    global _installed  # noqa: PLW0603 - one per process
    earlier = signal.getsignal(signal.SIGTERM)
    if isinstance(earlier, _Handler):
        earlier.export_with(flush, end)
        return
    if earlier is signal.SIG_IGN:
        return
    if earlier is None:
        _log.warning("samples will not be sent on SIGTERM: C code has installed a handler")
        return
    handler = _Handler(earlier, flush, end)
    signal.signal(signal.SIGTERM, handler)
    _installed = handler


def put_off_sigterm() -> contextlib.AbstractContextManager[None]:
    """Delay SIGTERM until the export at exit is done. A second SIGTERM takes effect immediately."""
    return contextlib.nullcontext() if _installed is None else _installed.put_off()
