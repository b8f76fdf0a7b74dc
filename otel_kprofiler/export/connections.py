"""Opens connections to receivers within a time limit."""

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

from otel_kprofiler.export.name_lookup import ConnectError, NameLookups, Watch


def connect_to(
    hosts: tuple[tuple[str, int], ...], deadline: float, watch: Watch, names: NameLookups
) -> socket.socket:
    """Tries all addresses in turn; each may take an equal part of the time that is left.

    Args:
        hosts: hosts (names, or IP addresses without brackets) and ports, in order of preference.
        deadline: a time of ``time.monotonic()``.

    Raises:
        ConnectError: no address can be reached.
        TimeoutError: the deadline has passed.
    """
    addresses = [
        (family, address, show_host(host, port))
        for host, port in hosts
        for family, address in names.resolve(host, port, deadline, watch)
    ]
    failure: Exception = ConnectError("the receiver's name has no address")
    for number, (family, address, shown) in enumerate(addresses):
        now = time.monotonic()
        try:
            part = (deadline - now) / (len(addresses) - number)
            return open_socket(family, address, shown, now + part, watch)
        except (ConnectError, TimeoutError) as error:
            failure = error
    raise failure


def show_host(host: str, port: int) -> str:
    """Returns the host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_socket(
    family: socket.AddressFamily, address: Any, shown: str, deadline: float, watch: Watch
) -> socket.socket:
    """Connects to one address, which messages show as ``shown``; see :func:`connect_to`."""
    with explained(f"cannot connect to {shown}"):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            _attempt(sock, address, deadline, watch)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
    return sock


def _attempt(sock: socket.socket, address: Any, deadline: float, watch: Watch) -> None:
    sock.setblocking(False)
    error = sock.connect_ex(address)
    watch(lambda: shut_down(sock))  # has no effect before the attempt begins
    if error == errno.EINPROGRESS:
        error = _wait_until_connected(sock, deadline)
    if error:
        raise OSError(error, os.strerror(error))


def _wait_until_connected(sock: socket.socket, deadline: float) -> int:
    """Returns the attempt's ``errno``; 0 if it succeeded. Raises ``TimeoutError``."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


@contextlib.contextmanager
def explained(text: str) -> Iterator[None]:
    """Raise system errors as ``ConnectError`` or ``TimeoutError``; ``text`` precedes the reason."""
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError(f"{text}: no response") from error
    except OSError as error:
        raise ConnectError(f"{text}: {error.strerror or error}") from error


def shut_down(sock: socket.socket) -> None:
    """Aborts the socket's operations in all threads."""
    with contextlib.suppress(OSError):  # not connected, or already closed
        # SSLSocket.shutdown() is unsafe while another thread reads.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
