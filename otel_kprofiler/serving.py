"""HTTP servers that limit connections: how many there are, and how long each takes."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from otel_kprofiler.errors import describe_error

MAX_CONNECTIONS: Final = 16
_FREE_WAIT_S: Final = 2.0

_log = logging.getLogger(__name__)


class HttpServer(ThreadingHTTPServer):
    """One thread per connection; limits the number of connections and their duration.

    Serves from its construction on.

    Args:
        endpoint: ``host:port`` to listen on; ``[::1]:port`` for IPv6, port 0 for a free one.
        handler: makes the answers.
        name: of the server in the log, and of its thread.
        timeout_s: time limit for a client to send its request and read the response.

    Attributes:
        timeout_s: the same.

    Raises:
        OSError: the endpoint cannot be listened on.
        ValueError: it has no port.
    """

    daemon_threads = True
    # With the default of 5, a client beyond them waits a second until it sends its SYN again.
    request_queue_size = 128

    def __init__(
        self, endpoint: str, handler: type[BaseHTTPRequestHandler], *, name: str, timeout_s: float
    ) -> None:
        host, _, port = endpoint.rpartition(":")
        self.timeout_s = timeout_s
        self._name = name
        self._open: dict[socket.socket, float] = {}  # by connection: its deadline; oldest first
        self._changed = threading.Condition()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host.strip("[]"), int(port)), handler)
        self._thread = threading.Thread(
            target=self.serve_forever, name=f"{name} server", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection; at the limit, close the oldest one first."""
        with self._changed:
            if len(self._open) >= MAX_CONNECTIONS:
                _break_off(next(iter(self._open)))
                self._changed.wait_for(lambda: len(self._open) < MAX_CONNECTIONS, _FREE_WAIT_S)
            is_free = len(self._open) < MAX_CONNECTIONS
            if is_free:
                self._open[request] = time.monotonic() + self.timeout_s
        if is_free:
            super().process_request(request, client_address)
        else:
            _log.warning("%s: connection refused: %d are open", self._name, MAX_CONNECTIONS)
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection; called however it ends."""
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify_all()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Abort overdue connections, twice a second: a client may send byte by byte."""
        with self._changed:
            now = time.monotonic()
            for request in [one for one, end in self._open.items() if end < now]:
                _break_off(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log one line if the client went away, a traceback for a bug of ours."""
        error = sys.exception()
        client = client_address[0] if client_address else "a client"
        if isinstance(error, OSError):
            _log.warning("%s: connection to %s lost: %s", self._name, client, describe_error(error))
        else:
            _log.exception("%s: a request from %s failed", self._name, client)


def _break_off(request: socket.socket) -> None:
    """Make the serving thread see the end of the connection."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
