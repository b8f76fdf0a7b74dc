"""Waits in the sampler's thread until the ring buffer contains records."""

import contextlib
import os
import select
import time
from typing import Final

from otel_kprofiler.bpf import NO_WAKEUP_NS, CpuLines, ReaderFlag, RingReader

_START_NS: Final = 50_000_000
"""Usual maximum time between a process's fork and its exec, in nanoseconds."""


class RecordWaiter:
    """Blocks until records are ready; only :meth:`wake` may be called from other threads.

    ``lines`` shows which records are in flight. ``flag`` selects the records that wake the reader.
    """

    def __init__(self, ring: RingReader, ring_fd: int, lines: CpuLines, flag: ReaderFlag) -> None:
        self._ring, self._lines, self._flag = ring, lines, flag
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._epoll = select.epoll()
            self._epoll.register(self._wake_fd, select.EPOLLIN)
            # Edge-triggered, because a non-empty ring would otherwise end every wait immediately.
            self._epoll.register(ring_fd, select.EPOLLIN | select.EPOLLET)
        except BaseException:
            os.close(self._wake_fd)
            raise

    def wait(self, timeout_s: float) -> bool:
        """Block until the ring is half full, :meth:`wake` is called, or the timeout expires.

        Returns whether :meth:`wake` was called.
        """
        woken = False
        for fd, _ in self._epoll.poll(timeout_s):
            if fd == self._wake_fd:
                woken = True
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
        return woken

    def wait_new(self, since_ns: int, least_s: float, most_s: float) -> None:
        """Block until the ring contains a record of a process that started after ``since_ns``.

        See :meth:`Sampler.wait_new`.
        """
        until = time.monotonic() + least_s
        if self.wait(least_s) or time.monotonic() < until:
            return
        since_ns -= _START_NS
        self._flag.wake_since(since_ns)
        try:
            # A new process may have been sampled before the flag was set.
            if self._flag.newest_start_ns() < since_ns:
                self.wait(most_s - least_s)
        finally:
            self._flag.wake_since(NO_WAKEUP_NS)

    def wait_first(self, timeout_s: float) -> bool:
        """Block until the ring contains a record, :meth:`wake` is called, or the timeout expires.

        Returns True if a record is ready, and False after :meth:`wake` or the timeout.
        """
        self._flag.wake_since(0)
        try:
            # The program may have read the flag before this thread set it.
            if not self._ring.is_empty() or any(self._lines.in_flight()):
                return True
            return not self.wait(timeout_s) and not self._ring.is_empty()
        finally:
            self._flag.wake_since(NO_WAKEUP_NS)

    def wake(self) -> None:
        """End the current or next ``wait`` call.

        May be called from any thread or signal handler.
        """
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close the descriptors."""
        self._epoll.close()
        os.close(self._wake_fd)
