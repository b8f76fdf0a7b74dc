"""The health endpoint: ``/livez``, ``/readyz`` and ``/status`` over HTTP."""

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

from otel_kprofiler.errors import HostError

MAX_CONNECTIONS: Final = 16
CONNECTION_TIMEOUT_S: Final = 5.0
"""So long a client may take for its request and for reading the answer."""
_FREE_WAIT_S: Final = 2.0

_log = logging.getLogger(__name__)

Probe = Callable[[], list[str]]
"""Returns what is wrong, one sentence each; empty when all is well."""


class HealthServer:
    """Answers 200 when nothing is wrong and 503 with the reasons otherwise.

    Args:
        endpoint: ``host:port`` to listen on; ``[::1]:port`` for IPv6, port 0 for a free one.
        probes: what to ask for each path, such as ``/livez``; called in server threads.
        status: the answer to ``/status``, as values for JSON; likewise.
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
                hint="give another service.health.endpoint, or end what listens there",
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kprofiler-health", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """One thread for each connection, of a bounded number, for a bounded time."""

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], probes: dict[str, Probe], status: Callable[[], object]
    ) -> None:
        self.probes = probes
        self.status = status
        self._open: dict[socket.socket, float] = {}  # with the time of its end, oldest first
        self._changed = threading.Condition()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection; at the limit, the oldest one is closed for it."""
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
            _log.warning("health: a connection was refused: %d are open", MAX_CONNECTIONS)
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """The connection has ended, however it came to that."""
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify_all()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Break off, twice a second, what takes too long: a client may send byte by byte."""
        with self._changed:
            now = time.monotonic()
            for request in [one for one, end in self._open.items() if end < now]:
                _break_off(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line for a client that goes away; a defect of ours with its traceback."""
        error = sys.exception()
        client = client_address[0] if client_address else "a client"
        if isinstance(error, OSError):
            _log.warning("health: the connection of %s has ended: %s", client, error)
        else:
            _log.exception("health: a request of %s has failed", client)


def _break_off(request: socket.socket) -> None:
    """Have the thread that serves a connection find it at its end."""
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
        """Health checks come every few seconds and are not worth a line each."""
