"""Waits for records in the ring, in the sampler's thread."""

from __future__ import annotations

import contextlib
import os
import select

from otel_kprofiler.bpf import CpuLines, ReaderFlag, RingReader


class RecordWaiter:
    """Blocks until records are ready. Only one thread may use it, except for :meth:`wake`.

    Args:
        ring: the BPF ring buffer to wait for.
        ring_fd: descriptor of the ring's map.
        lines: counters that show records in flight.
        flag: makes the program wake the reader on the next record.
    """

    def __init__(self, ring: RingReader, ring_fd: int, lines: CpuLines, flag: ReaderFlag) -> None:
        self._ring, self._lines, self._flag = ring, lines, flag
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._epoll = select.epoll()
            self._epoll.register(self._wake_fd, select.EPOLLIN)
            # Edge-triggered: otherwise a non-empty ring would end every wait immediately.
            self._epoll.register(ring_fd, select.EPOLLIN | select.EPOLLET)
        except BaseException:
            os.close(self._wake_fd)
            raise

    def wait(self, timeout_s: float) -> bool:
        """Block until the fill mark is passed, :meth:`wake` is called, or the timeout expires.

        Returns:
            Whether :meth:`wake` was called.
        """
        woken = False
        for fd, _ in self._epoll.poll(timeout_s):
            if fd == self._wake_fd:
                woken = True
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
        return woken

    def wait_first(self, timeout_s: float) -> bool:
        """Block until a record is in the ring, :meth:`wake` is called, or the timeout expires.

        Returns:
            Whether a record is ready, and :meth:`wake` was not called.
        """
        self._flag.set(True)
        try:
            # The program may have read the flag before it was set.
            if not self._ring.is_empty() or any(self._lines.in_flight()):
                return True
            return not self.wait(timeout_s) and not self._ring.is_empty()
        finally:
            self._flag.set(False)

    def wake(self) -> None:
        """End a wait. It may be called from any thread or signal handler."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close the descriptors."""
        self._epoll.close()
        os.close(self._wake_fd)
