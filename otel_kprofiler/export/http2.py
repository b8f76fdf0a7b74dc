"""Sends one request at a time over an HTTP/2 connection (RFC 9113), in the caller's thread."""

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings

Headers = dict[bytes, bytes]

_RECEIVE_BYTES: Final = 65536
_MAX_HEADER_BYTES: Final = 65536
_FRAME_HEADER: Final = struct.Struct(">IBI")
"""A frame's length (24 bits) and type, its flags, and its stream (RFC 9113, 4.1)."""
_GOAWAY: Final = 7
_GOAWAY_START: Final = struct.Struct(">II")
"""The last stream that the receiver processes, and an error code (RFC 9113, 6.8)."""
_STREAM_BITS: Final = 0x7FFFFFFF


class Http2Error(Exception):
    """The connection failed; the receiver may have processed the request."""


class UnprocessedError(Http2Error):
    """The receiver has not processed the request, so it can be sent again (RFC 9113, 8.7)."""


@dataclass(slots=True)
class Response:
    """A response to a request.

    Attributes:
        trailers: headers after the body.
        reset: the error code of a reset that ended the response early; None if it is complete.
        is_too_large: whether the body exceeds the limit; reading stops there.
    """

    headers: Headers = field(default_factory=dict)
    trailers: Headers = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    reset: int | None = None
    is_too_large: bool = False
    ended: bool = False


@contextlib.contextmanager
def _h2_errors() -> Iterator[None]:
    try:
        yield
    except H2Error as error:
        raise Http2Error(f"{type(error).__name__} {error}") from error


class _Protocol(H2Connection):
    MAX_CLOSED_STREAMS = 16  # by default, h2 keeps 65,536, which take several MB


def set_deadline(sock: socket.socket, deadline: float) -> None:
    """Limits the socket's next operation; raises ``TimeoutError`` if the deadline has passed.

    ``deadline`` is a time of ``time.monotonic()``.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    sock.settimeout(left)


def send_all(sock: socket.socket, data: bytes, deadline: float) -> None:
    """Sends data within a time limit, which ``SSLSocket.sendall()`` would apply to each part."""
    unsent = memoryview(data)
    while unsent:
        set_deadline(sock, deadline)
        unsent = unsent[sock.send(unsent) :]


class Http2Connection:
    """A connection as client. Not thread-safe.

    Nothing reads the socket between requests. A ping from the receiver is answered by the next
    call of :meth:`is_usable` or :meth:`exchange`.

    The constructor sends the client's settings and waits for the receiver's, so that a receiver
    that does not speak HTTP/2 is detected. It raises :class:`Http2Error` and ``OSError``.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._socket = sock
        self._buffer = bytearray()  # the start of a frame that is still arriving
        self._last_stream: int | None = None  # the last stream that the receiver processes
        self._stream = 0
        self._response = Response()
        self._is_idle = self._can_send = True
        self._has_settings = False
        # gRPC does not encode spaces at the ends of messages, which h2 would reject.
        config = H2Configuration(
            client_side=True, header_encoding=None, validate_inbound_headers=False
        )
        self._http2 = _Protocol(config)
        self._http2.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.MAX_HEADER_LIST_SIZE: _MAX_HEADER_BYTES,
            },
        )
        self._http2.initiate_connection()
        try:
            while not self._has_settings:
                self._send_and_receive(memoryview(b""), deadline)
        except Http2Error as error:
            raise Http2Error(f"no HTTP/2 response; is this a gRPC port? ({error})") from error

    def is_usable(self, deadline: float) -> bool:
        """Handles input that has arrived; returns whether another request can be sent."""
        self._socket.settimeout(0)
        try:
            while self._is_idle and time.monotonic() < deadline:
                self._take(self._socket.recv(_RECEIVE_BYTES))
        except (BlockingIOError, ssl.SSLWantReadError):
            return not self._is_closing()
        except (OSError, Http2Error):
            pass
        return False

    def _is_closing(self) -> bool:
        return self._last_stream is not None

    def exchange(
        self, headers: Iterable[tuple[bytes, bytes]], body: bytes, deadline: float, max_bytes: int
    ) -> Response:
        """Sends a request and returns the response, of whose body at most ``max_bytes`` are read.

        After an exception (``TimeoutError``, ``OSError``, :class:`Http2Error`), a reset, a response
        that is too large, or a response to a part of the request, the connection is unusable.
        """
        if self._is_closing():
            raise UnprocessedError("the receiver is closing the connection")
        self._is_idle = False
        self._response = response = Response()
        unsent = memoryview(body)
        with _h2_errors():
            self._stream = stream = self._http2.get_next_available_stream_id()
            self._http2.send_headers(stream, list(headers))
        while not response.ended:
            unsent = self._send_and_receive(unsent, deadline)
            if len(response.body) > max_bytes:
                response.is_too_large = True
                return response
            is_lost = self._last_stream is not None and self._last_stream < stream
            if is_lost and not response.ended:
                raise UnprocessedError("the receiver is closing the connection")
        if response.reset == ErrorCodes.REFUSED_STREAM:
            raise UnprocessedError("the receiver refused the stream")
        self._is_idle = not unsent and self._can_send and response.reset is None
        return response

    def _send_and_receive(self, unsent: memoryview, deadline: float) -> memoryview:
        """Sends as much of a request as possible, and waits for input; returns the rest."""
        try:
            if self._can_send:
                unsent = self._send(unsent, deadline)
        except TimeoutError:
            raise
        except OSError:  # the receiver's last output has the reason
            self._can_send = False
        set_deadline(self._socket, deadline)
        self._take(self._socket.recv(_RECEIVE_BYTES))
        return unsent

    def _send(self, unsent: memoryview, deadline: float) -> memoryview:
        """Sends the part of a request that flow control allows, and returns the rest."""
        http2, stream = self._http2, self._stream
        while unsent:
            with _h2_errors():
                window = http2.local_flow_control_window(stream)
                size = min(len(unsent), window, http2.max_outbound_frame_size)
                if size <= 0:
                    break
                http2.send_data(stream, unsent[:size], end_stream=size == len(unsent))
            unsent = unsent[size:]
        send_all(self._socket, http2.data_to_send(), deadline)
        return unsent

    def _take(self, data: bytes) -> None:
        if not data:
            raise Http2Error("the receiver closed the connection")
        self._buffer += data
        with _h2_errors():
            self._handle(self._http2.receive_data(self._take_frames()))

    def _take_frames(self) -> bytes:
        """Removes the complete frames from the buffer, and returns them without GOAWAY frames.

        After a GOAWAY frame, h2 rejects all frames, but the receiver still responds to requests up
        to the last stream that the frame names (RFC 9113, 6.8).
        """
        frames, start = bytearray(), 0
        while len(self._buffer) - start >= _FRAME_HEADER.size:
            word, _, _ = _FRAME_HEADER.unpack_from(self._buffer, start)
            end = start + _FRAME_HEADER.size + (word >> 8)
            if end > len(self._buffer):
                if word >> 8 <= self._http2.max_inbound_frame_size:
                    break
                end = len(self._buffer)  # h2 reports the error
            if word & 0xFF == _GOAWAY and end - start >= _FRAME_HEADER.size + _GOAWAY_START.size:
                last, _ = _GOAWAY_START.unpack_from(self._buffer, start + _FRAME_HEADER.size)
                self._last_stream = last & _STREAM_BITS
            else:
                frames += self._buffer[start:end]
            start = end
        del self._buffer[:start]
        return bytes(frames)

    def _handle(self, events: Iterable[object]) -> None:
        response = self._response
        for event in events:
            if isinstance(event, RemoteSettingsChanged):
                self._has_settings = True
            elif getattr(event, "stream_id", 0) == self._stream and not response.ended:
                self._handle_response(response, event)

    def _handle_response(self, response: Response, event: object) -> None:
        match event:
            case ResponseReceived(headers=headers):
                response.headers = dict(headers)
            case DataReceived(data=data, flow_controlled_length=size):
                response.body += data
                self._http2.acknowledge_received_data(size, self._stream)
            case TrailersReceived(headers=headers):
                response.trailers = dict(headers)
            case StreamEnded():
                response.ended = True
            case StreamReset(error_code=code):
                response.reset, response.ended = int(code), True
