"""Receives the kernel's kobject uevents as raw datagrams (lib/kobject_uevent.c).

pyroute2 only opens the socket. pyroute2's reader would drop the sender's address and the raw
datagram, and would stop after ``ENOBUFS``.
"""

import functools
import logging
import os
import select
import socket
from typing import Final

from otel_kprofiler.host.lean_import import import_module_alone

RECEIVE_BYTES: Final = 1 << 20
"""Size of the socket's buffer, in bytes. A size up to ``net.core.rmem_max`` needs no privilege."""
_DATAGRAM_BYTES: Final = 8192  # UEVENT_BUFFER_SIZE is 2048
_KERNEL_PID: Final = 0
_NETLINK_KOBJECT_UEVENT: Final = 15  # include/uapi/linux/netlink.h
_KERNEL_GROUP: Final = 1  # group 2 receives udev's copies
_log = logging.getLogger(__name__)


class Uevents:
    """A socket that receives the kernel's uevents (not udev's) without privileges.

    Only one thread may call :meth:`wait`, and only one thread at a time may call :meth:`receive`.
    All other methods are thread-safe. Raises ``OSError`` if the socket cannot be created.
    """

    def __init__(self, receive_bytes: int = RECEIVE_BYTES) -> None:
        self._socket = _open_socket()
        try:
            self._socket.setblocking(False)
            self._socket.bind((0, _KERNEL_GROUP))
        except OSError:
            self._socket.close()
            raise
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)

    def wait(self, timeout_s: float | None) -> None:
        """Block until a datagram arrives, :meth:`wake` is called, or the timeout expires."""
        ready = self._poll.poll(None if timeout_s is None else max(timeout_s, 0) * 1e3)
        if any(fd == self._wake_fd for fd, _ in ready):
            os.eventfd_read(self._wake_fd)

    def wake(self) -> None:
        """End the current or the next :meth:`wait`."""
        os.eventfd_write(self._wake_fd, 1)

    def is_waiting(self) -> bool:
        """Returns whether a datagram or an error is pending."""
        ready = select.poll()  # select(2) supports no descriptor above 1023
        ready.register(self._socket, select.POLLIN)
        return bool(ready.poll(0))

    def receive(self) -> list[bytes]:
        """Returns pending datagrams; never blocks. Raises ``OSError`` once after datagram loss."""
        datagrams: list[bytes] = []
        while True:
            try:
                data, (sender, _) = self._socket.recvfrom(_DATAGRAM_BYTES)
            except BlockingIOError:
                return datagrams
            if sender == _KERNEL_PID:
                datagrams.append(data)

    def close(self) -> None:
        """Close the socket; idempotent."""
        if self._wake_fd >= 0:
            self._socket.close()
            os.close(self._wake_fd)
            self._wake_fd = -1


def _open_socket() -> socket.socket:
    """Open an unbound socket, using pyroute2 if possible. Raises ``OSError``."""
    try:
        return _open_pyroute2()
    except Exception as error:  # noqa: BLE001 - whatever the library does, uevents are received
        opened = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_KOBJECT_UEVENT)
        _report_fallback(repr(error))
        return opened


def _open_pyroute2() -> socket.socket:
    """Open pyroute2's socket without its thread or event loop."""
    # Importing the package itself would load all protocols, another 10 MB.
    opened = import_module_alone("pyroute2.netlink.uevent").AsyncUeventSocket().setup_socket()
    if not isinstance(opened, socket.socket):
        raise TypeError(f"AsyncUeventSocket.setup_socket() returned {opened!r}")
    return opened


@functools.cache
def _report_fallback(error: str) -> None:
    """Log why pyroute2 is not used, once per reason."""
    _log.warning(
        "pyroute2 cannot open a uevent socket (%s); using the standard library instead",
        error,
    )
