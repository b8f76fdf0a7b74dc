"""Connections of requests that another thread can break off, and that log nothing."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Final

from requests.adapters import HTTPAdapter


class BreakableAdapter(HTTPAdapter):
    """Knows its sockets, so that another thread can break off an exchange. Thread-safe."""

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._broken_off = False
        super().__init__(pool_connections=1, pool_maxsize=1)

    def begin(self) -> None:
        """Allow another exchange."""
        with self._lock:
            self._broken_off = False

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        """Have the pool's connections tell which socket they use."""
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        make = type(pool).ConnectionCls

        def make_telling(*args: Any, **kwargs: Any) -> Any:
            connection: Any = make(*args, **kwargs)
            connect, open_socket = connection.connect, connection._new_conn  # noqa: SLF001
            connecting = contextlib.ExitStack()

            def open_and_tell() -> socket.socket:
                opened: socket.socket = open_socket()
                # The TLS handshake takes the descriptor away from its object.
                self._watch(connecting.enter_context(opened.dup()))
                return opened

            def connect_and_tell() -> None:
                # A proxy's answer and a handshake may trickle, too.
                with connecting:
                    connect()
                    self._watch(connection.sock)

            connection._new_conn = open_and_tell  # noqa: SLF001
            connection.connect = connect_and_tell
            return connection

        pool.ConnectionCls = make_telling
        return pool

    def break_off(self) -> None:
        """End every exchange under way as if the receiver had disconnected."""
        with self._lock:
            self._broken_off = True
            sockets = list(self._sockets)
        for sock in sockets:
            _shut_down(sock)

    def _watch(self, sock: Any) -> None:
        with self._lock:
            self._sockets.add(sock)
            too_late = self._broken_off
        if too_late:
            _shut_down(sock)


def _shut_down(sock: Any) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        # Not SSLSocket's own method, which is not made for another thread's reading.
        socket.socket.shutdown(getattr(sock, "socket", sock), socket.SHUT_RDWR)


class _Unlogged(logging.Filter):
    """Drops what urllib3 logs of our exchanges: it has addresses with their query.

    What matters comes as an exception.
    """

    def __init__(self) -> None:
        super().__init__()
        self._threads: set[int] = set()
        for name in ("connection", "connectionpool", "response", "util.retry"):
            logging.getLogger(f"urllib3.{name}").addFilter(self)

    @contextlib.contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """Drop them during the context."""
        self._threads.add(threading.get_ident())
        try:
            yield
        finally:
            self._threads.discard(threading.get_ident())

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log the record."""
        return threading.get_ident() not in self._threads


UNLOGGED: Final = _Unlogged()
