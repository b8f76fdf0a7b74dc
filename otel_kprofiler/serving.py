"""Provides HTTP servers that limit the number and duration of connections, and the header size."""

from __future__ import annotations

import contextlib
import http.client
import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

from otel_kprofiler.errors import describe_error
from otel_kprofiler.repeats import RepeatFilter

MAX_CONNECTIONS: Final = 16
MAX_HEADER_BYTES: Final = 32 << 10
"""Maximum total size of a request's headers. Common proxies forward at most 8 to 16 KiB."""
_FREE_WAIT_S: Final = 2.0
_LOOK_S: Final = 0.2
_STALLED_S: Final = 1.0
_PIECE_BYTES: Final = 64 << 10

_log = logging.getLogger(__name__)
_log.addFilter(RepeatFilter())  # clients determine how often connections break


class HttpServer(ThreadingHTTPServer):
    """An HTTP server with a thread per connection. Limits the number and duration of connections.

    The constructor starts the server on ``endpoint``, as ``host:port`` or, for IPv6,
    ``[::1]:port``. Port 0 selects a free port. The constructor raises ``OSError`` if the server
    cannot listen on ``endpoint``, and ``ValueError`` if the endpoint has no port. Within
    ``timeout_s``, a client must send its request and read the response. ``name`` is used in the
    log, and as the name of the server's thread. :attr:`host` is in lower case and without brackets.
    """

    daemon_threads = True
    # With the default backlog of 5, a client that finds the queue full waits a second before it
    # resends its SYN.
    request_queue_size = 128

    def __init__(
        self, endpoint: str, handler: type[HttpHandler], *, name: str, timeout_s: float
    ) -> None:
        host, _, port = endpoint.rpartition(":")
        self.host = host.strip("[]").lower()
        self.timeout_s = timeout_s
        self._name = name
        self._open: dict[socket.socket, float] = {}  # deadline by connection, oldest first
        # For each connection whose request has been read, the time when the client last read from
        # the response; infinite before the first read.
        self._answering: dict[socket.socket, float] = {}
        self._changed = threading.Condition()
        if ":" in self.host:
            self.address_family = socket.AF_INET6
        super().__init__((self.host, int(port)), handler)
        self._thread = threading.Thread(
            target=self.serve_forever, name=f"{name} server", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Returns the port on which the server listens."""
        return int(self.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection, closing an older connection if the limit is reached.

        Closes the oldest connection whose request has not been read yet, or if there is none, the
        connection whose client has been idle for the longest time.
        """
        until = time.monotonic() + _FREE_WAIT_S
        with self._changed:
            while not (is_free := len(self._open) < MAX_CONNECTIONS):
                now = time.monotonic()
                if now >= until:
                    break
                if (waiting := self._find_waiting(now)) is not None:
                    _break_off(waiting)
                self._changed.wait(min(until - now, _LOOK_S))
            if is_free:
                self._open[request] = time.monotonic() + self.timeout_s
        if is_free:
            super().process_request(request, client_address)
        else:
            self._warn("connection refused: %d connections are already open", MAX_CONNECTIONS)
            self.shutdown_request(request)

    def _find_waiting(self, now: float) -> socket.socket | None:
        idle = next((request for request in self._open if request not in self._answering), None)
        if idle is not None or not self._answering:
            return idle
        slowest = min(self._answering, key=self._answering.__getitem__)
        return slowest if now - self._answering[slowest] >= _STALLED_S else None

    def keep(self, request: socket.socket) -> None:
        """Keep a connection open after its request was read, even if other clients are waiting.

        The connection is closed after its response, at its deadline, or once its client stops
        reading while other clients wait.
        """
        with self._changed:
            if request in self._open:
                self._answering[request] = math.inf

    def note_progress(self, request: socket.socket) -> None:
        """Record that the client is reading the response."""
        with self._changed:
            if request in self._answering:
                self._answering[request] = time.monotonic()

    def shutdown_request(self, request: Any) -> None:
        """Forget a closed connection."""
        with self._changed:
            self._open.pop(request, None)
            self._answering.pop(request, None)
            self._changed.notify_all()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Abort overdue connections twice a second. A client may send one byte at a time."""
        with self._changed:
            now = time.monotonic()
            for request in [request for request, end in self._open.items() if end < now]:
                _break_off(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log one line if the client disconnected, and a traceback for any other error."""
        error = sys.exception()
        client = client_address[0] if client_address else "a client"
        if isinstance(error, OSError):
            self._warn("connection to %s lost: %s", client, describe_error(error))
        else:
            self._warn("a request from %s failed", client, exc_info=True)

    def _warn(self, message: str, *arguments: object, exc_info: bool = False) -> None:
        _log.log(
            logging.ERROR if exc_info else logging.WARNING,
            f"%s: {message}", self._name, *arguments,
            exc_info=exc_info or None, extra={"subject": f"{self._name} {self.port}"},
        )  # fmt: skip


def _break_off(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class HttpHandler(BaseHTTPRequestHandler):
    """Reads one request per connection, limits the size of headers, and logs no requests."""

    server: HttpServer
    server_version = "otel-kprofiler"
    sys_version = ""

    def parse_request(self) -> bool:
        """Parse the request line and the headers, or respond with 431 if the headers are too large.

        A handler that reads a body must call :meth:`HttpServer.keep` afterwards.
        """
        whole = self.rfile
        self.rfile = _Headers(whole)  # type: ignore[assignment] # the header parser reads lines
        try:
            is_parsed = super().parse_request()
        finally:
            self.rfile = whole
        if is_parsed and self.headers.get("Content-Length", "0") == "0":
            self.server.keep(self.connection)
        return is_parsed

    def respond(
        self, status: int, media_type: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a complete response. The ``timeout`` applies to each 64 KiB chunk of the body."""
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        rest = memoryview(body)
        while rest:
            self.server.note_progress(self.connection)
            self.wfile.write(rest[:_PIECE_BYTES])
            rest = rest[_PIECE_BYTES:]

    def is_named(self, *names: str) -> bool:
        """Returns whether the ``Host`` header contains an address or an accepted name.

        ``localhost``, the server's host and ``names`` are accepted. Any other name may belong to a
        site that directs browsers to this server (DNS rebinding).
        """
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            return False
        return host in {"localhost", self.server.host, *names} or is_address(host)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Does nothing, because requests arrive every few seconds and are not worth logging."""


class _Headers:
    """Reads header lines; raises ``LineTooLong`` beyond :data:`MAX_HEADER_BYTES` in total."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._left = MAX_HEADER_BYTES

    def readline(self, size: int) -> bytes:
        line = self._file.readline(min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("headers")
        return line


def is_address(host: str) -> bool:
    """Returns whether a host is an IP address, which DNS rebinding cannot forge."""
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address is reachable only from this host."""
    address = host.strip("[]")
    return host == "localhost" or (is_address(address) and ip_address(address).is_loopback)
