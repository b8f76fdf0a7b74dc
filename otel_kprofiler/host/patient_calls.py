"""Reads files in threads that are abandoned when a file system hangs.

A read from a frozen FUSE file system, or from NFS if the server is down, cannot be interrupted, but
must not block reads of other files. A thread is abandoned if a single wait for storage exceeds
:data:`PATIENCE_S`. No other thread reads from the device that an abandoned thread is waiting for.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import Final

PATIENCE_S: Final = 1.0
"""Time limit for a storage wait, in seconds. On timeout, callers continue without the data."""
MAX_LEFT: Final = 32
"""Maximum number of abandoned threads at any time. When the limit is reached, callers wait."""
_FUSE_WAIT: Final = "request_wait_answer"  # waits interruptibly at first (fs/fuse/dev.c)

_log = logging.getLogger(__name__)

Job = Callable[[], None]


class PatientCalls:
    """Calls functions that read files, and abandons calls that hang. Thread-safe.

    Each thread is started by the first caller that needs it, and inherits that caller's
    capabilities. ``on_left`` is called with the ``ident`` of an abandoned thread.
    """

    def __init__(
        self,
        name: str,
        patience_s: float = PATIENCE_S,
        on_left: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._patience_s = patience_s
        self._on_left = on_left
        self._lock = threading.Lock()
        self._idle: list[_Reader] = []
        self._left: dict[Hashable, _Reader] = {}  # by device
        self._readers: set[_Reader] = set()
        self._closed = False

    def call(
        self, device: Hashable, job: Job, find_hanging: Callable[[], Hashable] | None = None
    ) -> bool:
        """Call ``job`` in another thread (after :meth:`stop`, in this thread), and wait for it.

        ``job`` reads a file on ``device``, and handles its own errors. If ``job`` does not return,
        ``find_hanging`` identifies the device that hangs. Pass ``find_hanging`` if ``job`` also
        reads files on devices other than ``device``.

        Returns True if the call has returned, and False if the device hangs. If the device hangs,
        ``job`` finishes later, after the device has responded.
        """
        with self._lock:
            if device in self._left:
                self._left[device].jobs.append(job)
                return False
            reader = None if self._closed else self._idle.pop() if self._idle else self._start()
        if reader is None:
            _call(job)
            return True
        done = threading.Event()
        reader.begin(job, done)
        wait = None
        while not done.wait(self._patience_s):
            last, wait = wait, find_storage_wait(f"/proc/self/task/{reader.native_id}")
            is_over = self._is_closed() or (wait is not None and wait == last)
            hanging = find_hanging() if is_over and find_hanging else device
            if is_over and self._leave(hanging, reader, done):
                self._on_left(reader.ident or 0)
                return False
        with self._lock:
            self._idle.append(reader)
        return True

    def has_left(self, device: Hashable) -> bool:
        """Returns whether an abandoned thread is still waiting for this device."""
        return device in self._left

    def stop(self) -> list[threading.Thread]:
        """Make all calls return and all threads exit.

        Return the threads for the caller to join.
        """
        with self._lock:
            self._closed = True
            readers = list(self._readers)
        for reader in readers:
            reader.end()
        return list[threading.Thread](readers)

    def _is_closed(self) -> bool:
        with self._lock:
            return self._closed

    def _start(self) -> _Reader | None:
        """Return None if no thread can be started."""
        reader = _Reader(self._name, self._lock)
        try:
            reader.start()
        except RuntimeError as error:
            _log.warning("cannot start a thread (%s); files are read without a time limit", error)
            return None
        self._readers.add(reader)
        return reader

    def _leave(self, device: Hashable, reader: _Reader, done: threading.Event) -> bool:
        """Abandon a thread unless its call has returned, and return whether it was abandoned.

        At most :data:`MAX_LEFT` threads are abandoned at a time, unless :meth:`stop` was called.
        """
        with self._lock:
            if done.is_set() or (len(self._left) >= MAX_LEFT and not self._closed):
                return False
            if device not in self._left:
                self._left[device] = reader
            # If several threads hang on a device, only the first of them receives later calls.
            reader.on_free = lambda: self._forget(device, reader)
            return True

    def _forget(self, device: Hashable, reader: _Reader) -> bool:
        """Stop an abandoned thread that has nothing left to do."""
        with self._lock:
            if reader.jobs:
                return False
            if self._left.get(device) is reader:
                del self._left[device]
            self._readers.discard(reader)
            return True


class _Reader(threading.Thread):
    """A thread that makes queued calls one after another."""

    def __init__(self, name: str, lock: threading.Lock) -> None:
        super().__init__(name=name, daemon=True)
        self._lock = lock  # held while abandoning a thread or recording that its call has returned
        self.jobs: deque[Job] = deque()  # calls to make once the file system responds
        self.on_free: Callable[[], bool] | None = (
            None  # called with the lock held; returns whether to stop
        )
        self._begun: tuple[Job, threading.Event] | None = None
        self._wake = threading.Semaphore(0)
        self._ends = False

    def begin(self, job: Job, done: threading.Event) -> None:
        self._begun = job, done
        self._wake.release()

    def end(self) -> None:
        self._ends = True
        self._wake.release()

    def run(self) -> None:
        while True:
            self._wake.acquire()
            begun, self._begun = self._begun, None
            if begun is None:
                return
            job, done = begun
            _call(job)
            with self._lock:
                done.set()
                on_free = self.on_free
            if on_free is not None:
                while not on_free():
                    _call(self.jobs.popleft())
                return
            if self._ends:
                return


def _call(job: Job) -> None:
    try:
        job()
    except Exception:  # noqa: BLE001 - no file is a reason to stop reading others
        _log.exception("reading a file failed")


def find_storage_wait(directory: str) -> int | None:
    """Returns a number that identifies a thread's current wait for storage; None if not waiting."""
    task = Path(directory)
    with suppress(OSError):
        status = (task / "status").read_text()
        if "\nState:\tD" in status or (task / "wchan").read_text() == _FUSE_WAIT:
            return int(status.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return None
