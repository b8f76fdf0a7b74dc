"""Makes unary gRPC calls, one at a time, over one connection (gRPC over HTTP/2, "Requests").

An exporter makes one call every few seconds. This client has no threads, unlike gRPC's own, whose
threads poll after each call; it also uses a tenth of the memory.
"""

import base64
import gzip
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from otel_kprofiler.export.connections import shut_down
from otel_kprofiler.export.grpc_status import (
    Code,
    Status,
    frame_message,
    interpret_failure,
    interpret_response,
)
from otel_kprofiler.export.grpc_target import Target, connect
from otel_kprofiler.export.http2 import (
    Http2Connection,
    Http2Error,
    Response,
    UnprocessedError,
    set_deadline,
)
from otel_kprofiler.export.name_lookup import ConnectError, NameLookups
from otel_kprofiler.export.retry import Answer
from otel_kprofiler.forks import ProcessLock

_PROTOCOL: Final = "h2"
_MAX_TIMEOUT_MS: Final = 99_999_999
"""``grpc-timeout`` has at most eight digits."""
_SHUT_DOWN: Final = Status(Code.CANCELLED, "the exporter was shut down")

Header = tuple[bytes, bytes]


class GrpcChannel:
    """A receiver, and the connection to it, which is opened when a call needs it.

    Calls are made by one thread at a time; :meth:`close` may be called by another. A forked child
    opens a connection of its own, and leaves the parent's open.

    Args:
        make_context: returns the TLS settings for a new connection; None for plain text.
        proxy_url: ``http://[user:password@]host:port``; empty for no proxy.
        metadata: headers of each request, by lower-case name, without those that gRPC defines.
        max_bytes: maximum size of a response.
    """

    def __init__(
        self,
        target: Target,
        *,
        make_context: Callable[[], ssl.SSLContext] | None,
        proxy_url: str,
        metadata: Mapping[str, str],
        compresses: bool,
        max_bytes: int,
    ) -> None:
        self._target = target
        self._make_context = make_context
        self._proxy_url = proxy_url
        self._compresses = compresses
        self._max_bytes = max_bytes
        self._headers = [
            (b":method", b"POST"),
            (b":scheme", b"http" if make_context is None else b"https"),
            (b":authority", target.authority.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"grpc-accept-encoding", b"identity,gzip"),
            *([(b"grpc-encoding", b"gzip")] if compresses else []),
            *_encode_metadata(metadata),
        ]
        self._lock = ProcessLock()
        self._closed = threading.Event()
        self._names = NameLookups()
        self._is_busy = False
        self._abort: Callable[[], object] = lambda: None
        self._pid = os.getpid()  # the process that opened the connection
        self._socket: socket.socket | None = None
        self._http2: Http2Connection | None = None

    def frame(self, message: bytes) -> bytes:
        """Returns the body of a request, which :meth:`call` sends."""
        if self._compresses:
            message = gzip.compress(message, 6, mtime=0)
        return frame_message(message, is_compressed=self._compresses)

    def call(self, method: str, body: bytes, timeout_s: float) -> Answer:
        """Calls a method, and interprets the response or the failure."""
        with self._lock:
            self._leave_to_parent()
            if self._closed.is_set():
                return interpret_failure(_SHUT_DOWN)
            self._is_busy = True
        try:
            return self._call(method, body, timeout_s)
        finally:
            with self._lock:
                self._is_busy = False
                if self._closed.is_set():
                    self.disconnect()

    def _call(self, method: str, body: bytes, timeout_s: float) -> Answer:
        timeout_s = min(timeout_s, _MAX_TIMEOUT_MS / 1000)
        deadline = time.monotonic() + timeout_s
        timeout = b"%dm" % (timeout_s * 1000)
        headers = [(b":path", method.encode()), *self._headers, (b"grpc-timeout", timeout)]
        try:
            try:
                response = self._exchange(headers, body, deadline)
            except UnprocessedError:
                response = self._exchange(headers, body, deadline)
            return interpret_response(response, self._max_bytes)
        except TimeoutError as error:
            text = f"no response in {timeout_s:.1f} s ({error})"
            failure = Status(Code.DEADLINE_EXCEEDED, text)
        except (ConnectError, Http2Error) as error:
            failure = Status(Code.UNAVAILABLE, str(error))
        except OSError as error:
            failure = Status(Code.UNAVAILABLE, error.strerror or str(error))
        self.disconnect()
        if self._closed.is_set():
            failure = _SHUT_DOWN
        return interpret_failure(failure)

    def _exchange(self, headers: list[Header], body: bytes, deadline: float) -> Response:
        if self._http2 is None or not self._http2.is_usable(deadline):
            self.disconnect()
            self._http2 = self._connect(deadline)
        return self._http2.exchange(headers, body, deadline, self._max_bytes)

    def _connect(self, deadline: float) -> Http2Connection:
        self._socket = sock = connect(
            self._target, self._proxy_url, deadline, self._watch, self._names
        )
        if self._make_context is not None:
            sock = self._start_tls(sock, self._make_context(), deadline)
        return Http2Connection(sock, deadline)

    def _start_tls(
        self, sock: socket.socket, context: ssl.SSLContext, deadline: float
    ) -> ssl.SSLSocket:
        name = self._target.server_name
        context.set_alpn_protocols([_PROTOCOL])
        secure = context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
        self._socket = secure
        self._watch(lambda: shut_down(secure))
        set_deadline(secure, deadline)
        secure.do_handshake()
        if secure.selected_alpn_protocol() != _PROTOCOL:
            raise ConnectError(
                "the receiver does not offer HTTP/2 (ALPN h2) on this port: use its gRPC port"
            )
        return secure

    def _watch(self, abort: Callable[[], object]) -> None:
        with self._lock:
            if self._closed.is_set():
                raise ConnectError(_SHUT_DOWN.message)
            self._abort = abort

    def disconnect(self) -> None:
        """Closes the connection; the next call opens a new one. Not thread-safe."""
        self._http2 = None
        if self._socket is not None:
            if self._pid == os.getpid():
                # A forked child may share the connection, so closing it does not end it.
                shut_down(self._socket)
            self._socket.close()
            self._socket = None

    def _leave_to_parent(self) -> None:
        """In a forked child, closes the descriptor of the parent's connection."""
        if self._pid != os.getpid():
            self.disconnect()
            self._pid, self._is_busy = os.getpid(), False

    def close(self) -> None:
        """Aborts a running call; later calls fail. Thread-safe."""
        with self._lock:
            self._leave_to_parent()
            self._closed.set()
            if self._is_busy:
                self._abort()
            else:
                self.disconnect()


def _encode_metadata(metadata: Mapping[str, str]) -> list[Header]:
    headers = []
    for name, value in metadata.items():
        content = value.strip().encode()
        if name.endswith("-bin"):
            content = base64.b64encode(content).rstrip(b"=")
        headers.append((name.encode(), content))
    return headers
