"""The health endpoint: ``/livez``, ``/readyz`` and ``/status`` over HTTP."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from otel_kprofiler.errors import HostError

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
    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], probes: dict[str, Probe], status: Callable[[], object]
    ) -> None:
        self.probes = probes
        self.status = status
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 5  # a client that never finishes its request must not hold a thread

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
