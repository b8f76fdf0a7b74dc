"""Receivers that store accepted requests, and misbehave until they are healed."""

from __future__ import annotations

import contextlib
import gzip
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.table.payloads import split
from tests.servers import HttpServer, serve_grpc

_LINGER_0 = struct.pack("ii", 1, 0)


class HttpReceiver:
    """Receives over HTTP. ``answer`` handles each request until the receiver is healed."""

    exporter = "otlp_http"

    def __init__(self, answer: Callable[[Request], None] | None = None, address="127.0.0.1"):
        self.payloads, self.answer = [], answer or Request.accept
        self.server = HttpServer(self._answer, address=(address, 0))
        self.address = self.server.server_address[:2]

    def _answer(self, request):
        body = request.body
        if request.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        with contextlib.suppress(OSError):
            self.answer(Request(self, request, body))

    def configure(self, address=None) -> dict:
        """Returns the exporter's configuration. ``address`` may specify a proxy."""
        host, port = address or self.address
        return {"endpoint": f"http://{host}:{port}"}

    def heal(self) -> None:
        self.answer = Request.accept

    def close(self) -> None:
        self.server.close()


class Request:
    """An HTTP request, with methods that respond to it."""

    def __init__(self, receiver, handler, body):
        self.receiver, self.handler, self.body = receiver, handler, body

    def store(self) -> None:
        self.receiver.payloads.append(self.body)

    def reply(self, status=200, body=b"", kind="application/x-protobuf", **headers) -> None:
        """Sends a response. ``_`` in header names stands for ``-``."""
        self.handler.reply(status, body, **{"Content_Type": kind, **headers})

    def send(self, data: bytes) -> None:
        self.handler.wfile.write(data)

    def accept(self) -> None:
        self.store()
        self.reply()

    def close(self, *, reset=False) -> None:
        self.handler.close_connection = True
        if reset:
            self.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
            self.handler.connection.close()
        else:
            self.handler.connection.shutdown(socket.SHUT_RDWR)


class GrpcReceiver:
    """Calls ``answer(receiver, request, context)`` for each gRPC request until healed."""

    exporter = "otlp_grpc"

    def __init__(self, answer=None, *, max_bytes=4 << 20, credentials=None):
        self.payloads, self.answer = [], answer or accept
        self.server, port = serve_grpc(
            lambda request, context: self.answer(self, request, context),
            credentials=credentials,
            max_bytes=max_bytes,
        )
        self.address = "127.0.0.1", port
        self.tls = {} if credentials else {"insecure": True}

    def configure(self, address=None) -> dict:
        host, port = address or self.address
        return {"endpoint": f"{host}:{port}", "tls": self.tls}

    def heal(self) -> None:
        self.answer = accept

    def close(self) -> None:
        self.server.stop(0).wait()


def accept(receiver, request, context) -> bytes:
    receiver.payloads.append(request)
    return b""


class Proxy:
    """A receiver behind a proxy. ``manner(connection, connect)`` handles each connection."""

    def __init__(self, behind, manner: Callable[[socket.socket, Callable], None]):
        self.behind, self.manner, self.exporter = behind, manner, behind.exporter
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = self.listener.getsockname()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def payloads(self) -> list[bytes]:
        return self.behind.payloads

    def configure(self) -> dict:
        return self.behind.configure(self.address)

    def heal(self) -> None:
        self.manner = lambda connection, connect: connect()
        self.behind.heal()

    def close(self) -> None:
        self.listener.close()
        self.behind.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._handle, args=(connection,), daemon=True).start()

    def _handle(self, connection) -> None:
        with contextlib.suppress(OSError), connection:
            self.manner(connection, lambda **how: self._connect(connection, **how))

    def _connect(self, connection, *, there=None, back=None, pause_s=0.0, piece=65536) -> None:
        """Copies up to ``there`` bytes to the receiver and ``back`` bytes to the client."""
        with socket.create_connection(self.behind.address) as other:
            thread = threading.Thread(
                target=_copy, args=(connection, other, there, pause_s, piece), daemon=True
            )
            thread.start()
            _copy(other, connection, back, 0.0, 65536)


def _copy(source, target, limit, pause_s, piece) -> None:
    with contextlib.suppress(OSError):
        while limit is None or limit > 0:
            data = source.recv(piece if limit is None else min(piece, limit))
            if not data:
                break
            target.sendall(data)
            limit = None if limit is None else limit - len(data)
            time.sleep(pause_s)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class FileReceiver:
    """The file that the ``file`` exporter writes. ``others`` lists files moved from ``path``."""

    exporter = "file/subject"

    def __init__(self, **settings):
        self.settings, self.others, self.path = settings, [], None

    def place(self, directory: Path) -> None:
        (directory / "disk").mkdir()
        self.path = directory / "disk" / "subject.otlp"

    @property
    def payloads(self) -> list[bytes]:
        """Returns the requests in the file and in moved or rotated files."""
        rotated = self.path.parent.glob("subject-*")
        paths = {*self.others, *rotated, *([self.path] if self.path.exists() else [])}
        return [payload for path in sorted(paths) for payload in split(path.read_bytes())]

    def configure(self) -> dict:
        return {"path": str(self.path), "format": "proto", **self.settings}

    def heal(self) -> None:
        """Does nothing, because the fault itself restores the file."""

    def close(self) -> None:
        """Does nothing."""
