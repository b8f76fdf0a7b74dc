"""Loopback servers with scripted responses, and ports and certificates for them."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest

PROFILES = "opentelemetry.proto.collector.profiles.v1development.ProfilesService"


def serve_grpc(
    export, *, service=PROFILES, address="127.0.0.1:0", credentials=None, max_bytes=4 << 20
) -> tuple[grpc.Server, int]:
    """Starts a gRPC server whose method ``Export`` calls ``export``. Returns (server, port).

    ``export`` receives the request and context, and returns the response or aborts. Without
    ``credentials``, connections are unencrypted.
    """
    options = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", max_bytes))
    server = grpc.server(futures.ThreadPoolExecutor(4), options=options)
    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    if credentials:
        port = server.add_secure_port(address, credentials)
    else:
        port = server.add_insecure_port(address)
    assert port, address
    server.start()
    return server, port


class HttpRequest(BaseHTTPRequestHandler):
    """An HTTP request, with methods that send the response."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    server: HttpServer

    def do_POST(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.answer(self)

    do_GET = do_CONNECT = do_POST  # noqa: N815 - names of http.server

    def reply(self, status=200, body=b"", **headers) -> None:
        """Sends a response, with ``_`` in header names replaced by ``-``.

        Announces if ``close_connection`` is set, so that clients do not reuse the connection.
        """
        if self.close_connection:
            headers["Connection"] = "close"
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Logs nothing."""


class HttpServer(ThreadingHTTPServer):
    """An HTTP server that calls ``answer`` with each request. Uses TLS if a context is given."""

    request_queue_size = 64

    def __init__(
        self, answer: Callable[[HttpRequest], object], context=None, address=("127.0.0.1", 0)
    ):
        super().__init__(address, HttpRequest)
        self.answer, self._context = answer, context
        self.port = self.server_address[1]
        host = "https://localhost" if context else "http://127.0.0.1"
        self.url = f"{host}:{self.port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def finish_request(self, request, client_address):
        if self._context is None:
            super().finish_request(request, client_address)
            return
        with self._context.wrap_socket(request, server_side=True) as connection:
            super().finish_request(connection, client_address)

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), OSError):  # the client has disconnected
            super().handle_error(request, client_address)

    def close(self):
        self.shutdown()
        self._thread.join()
        self.server_close()

    def __exit__(self, *_):
        self.close()


def forward(source: socket.socket, sink: socket.socket, count=lambda _: None) -> None:
    """Forwards data until ``source`` ends. Calls ``count`` with the number of bytes received."""
    try:
        while data := source.recv(65536):
            count(len(data))
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        return


def free_ports(count: int) -> list[int]:
    """Returns unused ports that the kernel does not assign to outgoing connections."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            address = "127.0.0.1", random.randrange(10_000, 32_768)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(address))
                ports.append(address[1])
    return ports


def free_port() -> int:
    return free_ports(1)[0]


def make_certificate(directory: Path, name: str = "server") -> ssl.SSLContext:
    """Creates a self-signed ``NAME.pem`` and ``NAME.key`` for localhost. Returns a TLS context."""
    if not shutil.which("openssl"):
        pytest.skip("needs the openssl command to create certificates")
    words = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout {name}.key -out {name}.pem"
    )
    subprocess.run(["openssl", *words.split()], cwd=directory, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / f"{name}.pem", directory / f"{name}.key")
    return context
