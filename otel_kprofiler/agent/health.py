"""Serves ``/livez``, ``/readyz`` and ``/status`` over HTTP; ``agent.py`` makes their content."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from otel_kprofiler.errors import HostError, describe_error

MAX_CONNECTIONS: Final = 16
CONNECTION_TIMEOUT_S: Final = 5.0
"""Time limit for a client to send its request and read the response."""
_FREE_WAIT_S: Final = 2.0

_log = logging.getLogger(__name__)

Probe = Callable[[], list[str]]
"""Returns the problems, one sentence each; empty if healthy."""


class HealthServer:
    """Responds with 200 if a probe finds no problems, otherwise with 503 and the problems.

    Args:
        endpoint: ``host:port`` to listen on; ``[::1]:port`` for IPv6, port 0 for a free one.
        probes: by path, such as ``/livez``; called in server threads.
        status: returns the body of ``/status`` as values for JSON; likewise.

    Raises:
        HostError: the endpoint cannot be listened on.
    """

    def __init__(
        self, endpoint: str, probes: dict[str, Probe], status: Callable[[], object] = dict
    ) -> None:
        host, _, port = endpoint.rpartition(":")
        try:
            self._server = _Server((host.strip("[]"), int(port)), probes, status)
        except OSError as error:
            raise HostError(
                f"cannot listen on {endpoint} for health checks: {error.strerror}",
                hint="set another service.health.endpoint, or stop the process that listens there",
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kprofiler-health", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """One thread per connection; limits the number of connections and their duration."""

    daemon_threads = True
    # With the default of 5, a client beyond them waits a second until it sends its SYN again.
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], probes: dict[str, Probe], status: Callable[[], object]
    ) -> None:
        self.probes = probes
        self.status = status
        self._open: dict[socket.socket, float] = {}  # by connection: its deadline; oldest first
        self._changed = threading.Condition()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection; at the limit, close the oldest one first."""
        with self._changed:
            if len(self._open) >= MAX_CONNECTIONS:
                _break_off(next(iter(self._open)))
                self._changed.wait_for(lambda: len(self._open) < MAX_CONNECTIONS, _FREE_WAIT_S)
            is_free = len(self._open) < MAX_CONNECTIONS
            if is_free:
                self._open[request] = time.monotonic() + CONNECTION_TIMEOUT_S
        if is_free:
            super().process_request(request, client_address)
        else:
            _log.warning("health: connection refused: %d are open", MAX_CONNECTIONS)
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
            _log.warning("health: connection to %s lost: %s", client, describe_error(error))
        else:
            _log.exception("health: a request from %s failed", client)


def _break_off(request: socket.socket) -> None:
    """Make the serving thread see the end of the connection."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CONNECTION_TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        probe = self.server.probes.get(path)
        if probe is None and path != "/status":
            self.send_error(404)
            return
        problems = probe() if probe else []
        answer = {"ok": not problems, "problems": problems} if probe else self.server.status()
        body = json.dumps(answer).encode() + b"\n"
        self.send_response(503 if problems else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Do not log health checks, which come every few seconds."""
