"""Serves ``/livez``, ``/readyz`` and ``/status`` over HTTP."""

import errno
import json
import logging
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from otel_kprofiler.errors import HostError
from otel_kprofiler.serving import HttpHandler, HttpServer, is_loopback

CONNECTION_TIMEOUT_S: Final = 5.0
"""Time limit for a client to send its request and read the response."""

RETRY_S: Final = 5.0
"""Seconds between attempts to listen on an address that is not available yet."""

_PASSING: Final = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
"""Errors that may pass: another process uses the port, or the host has no such address. When the
agent starts during boot, the network may not be configured yet."""

Probe = Callable[[], list[str]]
"""A health check: returns the problems, one sentence each; empty if there are none."""
_log: Final = logging.getLogger(__name__)


class HealthServer:
    """Responds with 200 if a probe finds no problems, otherwise with 503 and the problems.

    Server threads call probes and ``status``. Raises ``HostError`` if the endpoint cannot be bound.

    Args:
        endpoint: ``host:port`` or ``[IPv6]:port`` to listen on; port 0 selects a free port.
        probes: health checks by path, such as ``/livez``.
        status: returns the body of ``/status`` as values for JSON.
        waits: whether to wait until a port in use becomes free, and the address exists. Another
            user's process may have bound a port above 1023 before the agent started.
    """

    def __init__(
        self,
        endpoint: str,
        probes: dict[str, Probe],
        status: Callable[[], object] = dict,
        *,
        waits: bool = False,
    ) -> None:
        self._open = partial(_Server, endpoint, probes, status)
        self._server: _Server | None = None
        self._closing = threading.Event()
        self._waiting = threading.Thread(target=self._wait, name="kprofiler-health", daemon=True)
        try:
            self._server = self._open()
        except OSError as error:
            problem = f"cannot listen on {endpoint} for health checks: {error.strerror}"
            hint = "change service.health.endpoint"
            if error.errno == errno.EADDRINUSE:
                hint += ", or stop the process that listens there"
            may_pass = error.errno in _PASSING or isinstance(error, socket.gaierror)
            if not waits or not may_pass:
                raise HostError(problem, hint=hint) from error
            _log.error("%s; retrying every %g s\nfix: %s", problem, RETRY_S, hint)
            self._waiting.start()

    def _wait(self) -> None:
        while self._server is None and not self._closing.wait(RETRY_S):
            try:
                self._server = self._open()
            except OSError as error:
                _log.debug("the health endpoint is not available yet: %s", error)
            else:
                _log.info("listening for health checks")

    @property
    def port(self) -> int:
        """Returns the port that the server listens on; 0 until the server is listening."""
        return self._server.port if self._server else 0

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        if self._waiting.ident is not None:
            self._waiting.join()
        if self._server:
            self._server.close()


class _Server(HttpServer):
    def __init__(
        self, endpoint: str, probes: dict[str, Probe], status: Callable[[], object]
    ) -> None:
        self.probes = probes
        self.status = status
        super().__init__(endpoint, _Handler, name="health", timeout_s=CONNECTION_TIMEOUT_S)


class _Handler(HttpHandler):
    server: _Server
    timeout = CONNECTION_TIMEOUT_S

    def do_GET(self) -> None:  # noqa: N802 - name of http.server
        # Browsers always send Host, but probes might not.
        if "Host" in self.headers and is_loopback(self.server.host) and not self.is_named():
            self.send_error(403)
            return
        path = self.path.partition("?")[0]
        probe = self.server.probes.get(path)
        if probe is None and path != "/status":
            self.send_error(404)
            return
        problems = probe() if probe else []
        answer = {"ok": not problems, "problems": problems} if probe else self.server.status()
        body = json.dumps(answer).encode() + b"\n"
        self.respond(503 if problems else 200, "application/json", body)
