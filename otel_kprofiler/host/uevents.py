"""The kernel's kobject uevents, as raw datagrams (lib/kobject_uevent.c)."""

from __future__ import annotations

import os
import select
import socket
from typing import Final

RECEIVE_BYTES: Final = 1 << 20
"""Size of the socket's buffer; the kernel allows up to ``net.core.rmem_max`` without rights."""
_DATAGRAM_BYTES: Final = 8192  # UEVENT_BUFFER_SIZE is 2048
_KERNEL_PID: Final = 0


class Uevents:
    """A socket that gets what the kernel, and nobody else, announces; needs no privilege.

    ``wait`` belongs to one thread, the rest may be called from any; :meth:`receive` by one
    caller at a time.

    Args:
        receive_bytes: size of the socket's buffer.

    Raises:
        OSError: the kernel gives no such socket.
    """

    def __init__(self, receive_bytes: int = RECEIVE_BYTES) -> None:
        # Its package loads 11 MB and takes 0.2 s; only hosts with modules need it.
        from pyroute2.netlink.uevent import (  # noqa: PLC0415
            MONITOR_GROUP_KERNEL,
            UeventSocket,
        )

        with UeventSocket() as opened:
            opened.bind(MONITOR_GROUP_KERNEL)  # by default it would bind to udev's copies too
            self._socket = socket.socket(fileno=os.dup(opened.fileno()))
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)

    def wait(self, timeout_s: float | None) -> None:
        """Return when something waits to be received, after :meth:`wake`, or in the end."""
        ready = self._poll.poll(None if timeout_s is None else max(timeout_s, 0) * 1e3)
        if any(fd == self._wake_fd for fd, _ in ready):
            os.eventfd_read(self._wake_fd)

    def wake(self) -> None:
        """End the :meth:`wait` of the other thread, or the next one."""
        os.eventfd_write(self._wake_fd, 1)

    def is_waiting(self) -> bool:
        """Whether something waits to be received; an error counts."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def receive(self) -> list[bytes]:
        """All datagrams that wait; never blocks.

        Raises:
            OSError: ``ENOBUFS`` once after datagrams were lost; what was kept can be received
                by the next call.
        """
        found: list[bytes] = []
        while True:
            try:
                data, (sender, _) = self._socket.recvfrom(_DATAGRAM_BYTES)
            except BlockingIOError:
                return found
            if sender == _KERNEL_PID:
                found.append(data)

    def close(self) -> None:
        """Close the socket; may be called again."""
        if self._wake_fd >= 0:
            self._socket.close()
            os.close(self._wake_fd)
            self._wake_fd = -1
