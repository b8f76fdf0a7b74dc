"""Handles the signals that end a recording: SIGINT, SIGTERM and SIGHUP."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Self

from otel_kprofiler.cli.terminal import say

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndSignals:
    """Context manager that catches the signals that end a recording.

    For use in the main thread only. The first signal after :meth:`listen` is stored in
    ``received``. A signal received before :meth:`listen` raises ``SystemExit``, because nothing has
    been recorded yet. A second signal also raises ``SystemExit``, because the user does not want to
    wait for the results. An ignored SIGHUP (nohup) remains ignored.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._announce: Callable[[], None] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def listen(self, announce: Callable[[], None]) -> None:
        """Store the first signal received from now on; the signal handler calls ``announce``."""
        self._announce = announce

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, _Left):
            say(str(error), err=True)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._announce is None:
            raise _Left(number, f"ended by {name} before sampling began: nothing was recorded")
        if self.received is not None:
            raise _Left(number, f"ended by a second {name}")
        self.received = signal.Signals(number)
        self._announce()


class _Left(SystemExit):
    """Ends the process with the exit status that shells report for a signal."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(128 + number)
        self._message = message

    def __str__(self) -> str:
        return self._message
