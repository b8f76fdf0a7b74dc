"""Calls functions that access a disk, and gives up calls to which the disk does not respond."""

from __future__ import annotations

import errno
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

PATIENCE_S: Final = 5.0
"""Time limit for one call, in seconds; more than a slow disk takes to sync a batch."""

_T = TypeVar("_T")


class DiskThread:
    """Makes calls one after another in a daemon thread, because they cannot be interrupted.

    A call that exceeds :data:`PATIENCE_S` raises ``TimeoutError``. Its function continues, and all
    further calls fail immediately until the function has returned. The thread ends once this object
    is closed or no longer referenced. Thread-safe.

    Attributes:
        is_closed: whether :meth:`close` was called. Later calls are made in the calling thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = queue.SimpleQueue[_Call[Any] | None]()
        self._running: _Call[Any] | None = None
        self._late: _Call[Any] | None = None  # the call that was given up while it was running
        self.is_closed = False
        threading.Thread(
            target=_run, args=(weakref.ref(self), self._calls), name="kprofiler-spool", daemon=True
        ).start()
        weakref.finalize(self, self._calls.put, None)

    @property
    def is_hung(self) -> bool:
        """Returns whether a function that was given up is still running."""
        return self._late is not None

    def call(self, function: Callable[[], _T], *, is_kept: bool = False) -> _T:
        """Returns the function's result. Raises its exception, or ``TimeoutError``.

        If ``is_kept`` is set, the function is called once the disk responds, even after a timeout.
        """
        call = _Call(function, is_kept)
        with self._lock:
            is_direct, late = self.is_closed, self._late
            if not is_direct and (is_kept or not late):
                self._calls.put(call)
        if late:
            raise _no_response()
        if is_direct:
            return function()
        if not call.ended.wait(PATIENCE_S) and self._give_up(call):
            raise _no_response()
        call.ended.wait()
        return call.result()

    def _give_up(self, call: _Call[Any]) -> bool:
        """Returns whether the caller need not wait any longer."""
        with self._lock:
            if call.is_final or call.ended.is_set():
                return False
            call.is_abandoned = True
            if call is self._running:
                self._late = call
            return True

    def confirm(self) -> None:
        """Make the caller of the running function wait until the function returns.

        Raises ``TimeoutError`` if the caller has given up. The function must then undo its effect.
        """
        with self._lock:
            if call := self._running:
                if call.is_abandoned:
                    raise _no_response()
                call.is_final = True

    def close(self) -> None:
        """End the thread after all calls; idempotent."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._calls.put(None)

    def make(self, call: _Call[Any]) -> None:
        """Run a call in the thread, unless its caller has given up."""
        with self._lock:
            self._running = call
            is_due = call.is_kept or not call.is_abandoned
        if is_due:
            call.run()
        with self._lock:
            self._running = self._late = None
            call.ended.set()


def _run(owner: weakref.ref[DiskThread], calls: queue.SimpleQueue[_Call[Any] | None]) -> None:
    while call := calls.get():
        if disk := owner():
            disk.make(call)
        del call, disk  # both may keep the owner alive


class _Call(Generic[_T]):
    def __init__(self, function: Callable[[], _T], is_kept: bool) -> None:
        self._function = function
        self.is_kept = is_kept
        self._results: list[_T] = []
        self._error: BaseException | None = None
        self.ended = threading.Event()
        self.is_abandoned = False
        self.is_final = False  # whether the function can no longer be given up

    def run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            self._error = error

    def result(self) -> _T:
        if self._error:
            raise self._error
        return self._results[0]


def _no_response() -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, "the disk does not respond")
