"""HTTP connections that log nothing and allow another thread to abort a request."""

import contextlib
import errno
import logging
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator
from http.cookiejar import DefaultCookiePolicy
from typing import Any, Final

import requests
from requests.adapters import HTTPAdapter

from otel_kprofiler.forks import ProcessLock


class PlainSession(requests.Session):
    """A session that sends no credentials or cookies by itself, and follows no redirects.

    The base class would read a redirect's entire body.
    """

    def __init__(self, adapter: HTTPAdapter, user_agent: str) -> None:
        super().__init__()
        self.mount("http://", adapter)
        self.mount("https://", adapter)
        # If auth were None, requests would replace Authorization with credentials from ~/.netrc.
        self.auth = lambda request: request
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self.headers.update({"User-Agent": user_agent, "Accept-Encoding": "identity"})

    def get_redirect_target(self, resp: requests.Response) -> None:
        """Returns None, so that no redirect is followed."""


class AbortableAdapter(HTTPAdapter):
    """Tracks its sockets so that another thread can abort an exchange. Thread-safe.

    By default, receivers are verified against the system's certificates, not certifi's.
    """

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = ProcessLock()
        self._aborted = False
        self._exchange = 0  # number of the last exchange
        super().__init__(pool_connections=1, pool_maxsize=1)

    def begin(self) -> int:
        """Allow a new exchange, even after an abort, and return the exchange's number."""
        with self._lock:
            self._aborted = False
            self._exchange += 1
            return self._exchange

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the connection pool, modified to track the sockets of its connections."""
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        make = type(pool).ConnectionCls

        def make_tracked(*args: Any, **kwargs: Any) -> Any:
            connection: Any = make(*args, **kwargs)
            connect, open_socket = connection.connect, self._find_opener(connection)
            send = connection.request
            connecting = contextlib.ExitStack()

            def open_tracked() -> socket.socket:
                opened = open_socket()
                # The TLS handshake detaches the descriptor from this socket object.
                self._watch(connecting.enter_context(opened.dup()))
                return opened

            def connect_tracked() -> None:
                # An abort must also end the connection phase, because a proxy's response or a
                # handshake may trickle in.
                with connecting:
                    connect()
                    self._watch(connection.sock)

            def send_whole(*args: Any, **kwargs: Any) -> None:
                # urllib3 reads any response after a broken pipe, but not after the equivalent TLS
                # error. In TLS 1.3, a client certificate is rejected after the handshake, and only
                # a read reports the reason.
                try:
                    send(*args, **kwargs)
                except ssl.SSLEOFError as error:
                    raise BrokenPipeError(errno.EPIPE, str(error)) from error

            connection._new_conn = open_tracked  # noqa: SLF001
            connection.connect = connect_tracked
            connection.request = send_whole
            return connection

        pool.ConnectionCls = make_tracked
        return pool

    def _find_opener(self, connection: Any) -> Callable[[], socket.socket]:
        """Returns the function that resolves a connection's host and opens its socket."""
        opener: Callable[[], socket.socket] = connection._new_conn  # noqa: SLF001 - no public one
        return opener

    def build_connection_pool_key_attributes(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the settings of a connection, without the context that trusts certifi's bundle.

        requests 2.32.3 and 2.32.4 share such a context among all sessions.
        """
        host, settings = super().build_connection_pool_key_attributes(*args, **kwargs)
        settings.pop("ssl_context", None)
        return host, settings

    def cert_verify(self, conn: Any, url: str, verify: Any, cert: Any) -> None:
        """Set a connection's certificates, but none if ``verify`` is True.

        Without certificates, urllib3 loads those of OpenSSL, which reads ``SSL_CERT_FILE``.
        """
        base: Any = super()
        base.cert_verify(conn, url, verify, cert)
        if verify is True:
            conn.ca_certs = conn.ca_cert_dir = None

    def abort(self, exchange: int | None = None) -> None:
        """Abort every running exchange as if the receiver had disconnected.

        Does nothing if ``exchange`` is given and a later exchange has begun.
        """
        with self._lock:
            if exchange not in (None, self._exchange):
                return
            self._aborted = True
            for sock in list(self._sockets):
                _shut_down(sock)

    def leave_to_parent(self) -> None:
        """In a forked child, close the descriptors of the parent's connections."""
        with self._lock:
            self._sockets.clear()
        self.close()

    def _watch(self, sock: Any) -> None:
        with self._lock:
            self._sockets.add(sock)
            too_late = self._aborted
        if too_late:
            _shut_down(sock)


def _shut_down(sock: Any) -> None:
    with contextlib.suppress(OSError):  # already closed
        # SSLSocket.shutdown() is unsafe while another thread reads.
        socket.socket.shutdown(getattr(sock, "socket", sock), socket.SHUT_RDWR)


class _Silencer(logging.Filter):
    """Drops urllib3's log records during exchanges, because they contain query strings."""

    def __init__(self) -> None:
        super().__init__()
        self._threads: set[int] = set()
        for name in ("connection", "connectionpool", "response", "util.retry"):
            logging.getLogger(f"urllib3.{name}").addFilter(self)

    @contextlib.contextmanager
    def this_thread(self) -> Iterator[None]:
        self._threads.add(threading.get_ident())
        try:
            yield
        finally:
            self._threads.discard(threading.get_ident())

    def filter(self, record: logging.LogRecord) -> bool:
        return threading.get_ident() not in self._threads


SILENCED: Final = _Silencer()
