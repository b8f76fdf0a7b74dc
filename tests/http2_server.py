"""An HTTP/2 server on the loopback interface, whose frames each test chooses."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, PingAckReceived, RequestReceived, StreamEnded
from h2.settings import SettingCodes

TRAILERS = [("grpc-status", "0")]
HEADERS = [(":status", "200"), ("content-type", "application/grpc")]


class Http2Peer:
    """The server's side of one connection."""

    def __init__(self, sock: socket.socket, settings: dict[SettingCodes, int]):
        self.socket = sock
        config = H2Configuration(
            client_side=False, header_encoding="utf-8", normalize_outbound_headers=False
        )
        self.http2 = H2Connection(config)
        self.http2.initiate_connection()
        if settings:
            self.http2.update_settings(settings)
        self.pongs = 0
        self.headers: dict[str, str] = {}  # of the last whole request
        self.flush()

    def flush(self) -> None:
        if data := self.http2.data_to_send():
            self.socket.sendall(data)

    def receive(self) -> list[object]:
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError
        events = self.http2.receive_data(data)
        self.pongs += sum(isinstance(event, PingAckReceived) for event in events)
        self.flush()
        return events

    def read_headers(self) -> int:
        """Waits for a request's headers. Returns the stream."""
        while True:
            for event in self.receive():
                if isinstance(event, RequestReceived):
                    return event.stream_id

    def read_request(self) -> tuple[int, bytes]:
        """Reads a whole request. Returns the stream and the message."""
        body, stream = b"", 0
        while True:
            for event in self.receive():
                if isinstance(event, RequestReceived):
                    self.headers = dict(event.headers)
                elif isinstance(event, DataReceived):
                    body += event.data
                    self.http2.acknowledge_received_data(
                        event.flow_controlled_length, event.stream_id
                    )
                elif isinstance(event, StreamEnded):
                    stream = event.stream_id
            self.flush()
            if stream:
                return stream, body[5:]

    def respond(
        self, stream: int, message: bytes = b"", trailers=TRAILERS, *, encoding: str = ""
    ) -> None:
        headers = [("grpc-encoding", encoding)] if encoding else []
        prefix = (b"\1" if encoding else b"\0") + len(message).to_bytes(4, "big")
        self.http2.send_headers(stream, HEADERS + headers)
        self.http2.send_data(stream, prefix + message)
        self.http2.send_headers(stream, trailers, end_stream=True)
        self.flush()

    def send_goaway(self, last_stream: int) -> None:
        """Sends a GOAWAY frame without closing the connection (RFC 9113, 6.8)."""
        payload = last_stream.to_bytes(4, "big") + bytes(4)
        self.socket.sendall(len(payload).to_bytes(3, "big") + b"\7\0" + bytes(4) + payload)


class Http2Server:
    """Passes each connection to the next of ``serve``, and the last of them to further ones.

    ``settings`` are the server's HTTP/2 settings. Errors are kept in ``errors``.
    """

    def __init__(self, *serve: Callable[[Http2Peer], object], settings=None, address=None):
        self.serve, self.settings = serve, settings or {}
        family = socket.AF_UNIX if address else socket.AF_INET
        self.listener = socket.socket(family)
        self.listener.bind(address or ("127.0.0.1", 0))
        self.listener.listen()
        self.address = self.listener.getsockname()
        self.connections = 0
        self.errors: list[Exception] = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    @property
    def port(self) -> int:
        return self.address[1]

    def run(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            if sock.family == socket.AF_INET:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            serve = self.serve[min(self.connections, len(self.serve) - 1)]
            self.connections += 1
            with sock, contextlib.suppress(OSError):
                try:
                    serve(Http2Peer(sock, self.settings))
                except OSError:
                    raise
                except Exception as error:  # noqa: BLE001 - the test checks errors
                    self.errors.append(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(30)
        assert not self.errors, self.errors


def answer_all(peer: Http2Peer) -> None:
    """Accepts all requests until the client disconnects."""
    while True:
        stream, _ = peer.read_request()
        peer.respond(stream)
