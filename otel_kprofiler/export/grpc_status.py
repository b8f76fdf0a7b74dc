"""Interprets the responses of gRPC receivers (gRPC over HTTP/2; OTLP specification)."""

import base64
import binascii
import enum
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import unquote

from h2.errors import ErrorCodes

from otel_kprofiler.export.http2 import Headers, Response
from otel_kprofiler.export.inflate import inflate
from otel_kprofiler.export.partial_success import parse_partial_success
from otel_kprofiler.export.retry import Answer, Verdict


class Code(enum.IntEnum):
    """Status codes (gRPC, "Status codes and their use in gRPC")."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


RETRYABLE: Final = frozenset(
    {
        Code.CANCELLED,
        Code.DEADLINE_EXCEEDED,
        Code.ABORTED,
        Code.OUT_OF_RANGE,
        Code.UNAVAILABLE,
        Code.DATA_LOSS,
    }
)
"""The codes that OTLP defines as retryable, besides RESOURCE_EXHAUSTED with RetryInfo."""
_TOO_LARGE: Final = re.compile(
    r"message[ \w]*? larger than max|message exceeds (the )?(configured )?max|larger than max size"
    r"|message length too large|status:? 413|(payload|entity) too large",
    re.IGNORECASE,
)
"""Matches errors about requests that are too large. In order, the alternatives match messages from
gRPC for Go, C++, Python and Ruby; gRPC for Java and .NET; tonic; and HTTP proxies."""
_TOO_LARGE_CODES: Final = frozenset(
    {
        Code.RESOURCE_EXHAUSTED,
        Code.OUT_OF_RANGE,
        Code.INVALID_ARGUMENT,
        Code.INTERNAL,
        Code.UNKNOWN,
    }
)
_MIN_LIMIT_BYTES: Final = 1024
"""Smallest number in an error message that is interpreted as a size limit, in bytes."""
_HTTP_CODES: Final[Mapping[int, Code]] = {
    HTTPStatus.BAD_REQUEST: Code.INTERNAL,
    HTTPStatus.UNAUTHORIZED: Code.UNAUTHENTICATED,
    HTTPStatus.FORBIDDEN: Code.PERMISSION_DENIED,
    HTTPStatus.NOT_FOUND: Code.UNIMPLEMENTED,
    HTTPStatus.TOO_MANY_REQUESTS: Code.UNAVAILABLE,
    HTTPStatus.BAD_GATEWAY: Code.UNAVAILABLE,
    HTTPStatus.SERVICE_UNAVAILABLE: Code.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: Code.UNAVAILABLE,
}
"""Codes of responses without a gRPC status (gRPC, "HTTP to gRPC Status Code Mapping")."""
_RESET_CODES: Final[Mapping[int, Code]] = {
    ErrorCodes.REFUSED_STREAM: Code.UNAVAILABLE,
    ErrorCodes.CANCEL: Code.CANCELLED,
    ErrorCodes.ENHANCE_YOUR_CALM: Code.RESOURCE_EXHAUSTED,
    ErrorCodes.INADEQUATE_SECURITY: Code.PERMISSION_DENIED,
}
"""Codes of resets; INTERNAL for others (gRPC over HTTP/2, "HTTP2 Transport Mapping")."""
_PREFIX_BYTES: Final = 5
"""The compression flag and the length in front of each message ("Length-Prefixed-Message")."""


class Status(NamedTuple):
    """The status of a call; ``details`` is a serialized ``google.rpc.Status``, or empty."""

    code: Code
    message: str = ""
    details: bytes = b""


def frame_message(message: bytes, *, is_compressed: bool) -> bytes:
    """Returns a message with its prefix, for the body of a request."""
    return b"%c%b%b" % (is_compressed, len(message).to_bytes(4, "big"), message)


def interpret_response(response: Response, max_bytes: int) -> Answer:
    """Interprets a response, of whose body at most ``max_bytes`` were read.

    A success whose body is too large or unreadable still counts as a success, because the receiver
    has accepted the request. Only a success has a body (gRPC over HTTP/2, "Responses").
    """
    if response.is_too_large and _is_grpc(response.headers):
        problem = f"it exceeds {max_bytes} bytes"
        return Answer(Verdict.ACCEPTED, Code.OK.name, unreadable=problem)
    status = _read_status(response)
    if status.code is not Code.OK:
        return interpret_failure(status)
    try:
        partial = parse_partial_success(_read_message(response, max_bytes))
    except ValueError as error:
        return Answer(Verdict.ACCEPTED, Code.OK.name, unreadable=str(error))
    return Answer(Verdict.ACCEPTED, Code.OK.name, partial.message, partial.rejected)


def interpret_failure(status: Status) -> Answer:
    """Decides whether a failed request can be retried or divided."""
    code, message = status.code, status.message
    delay = parse_retry_delay(status.details) if status.details else None
    if code in _TOO_LARGE_CODES and delay is None and (match := _TOO_LARGE.search(message)):
        limit = parse_limit(message[match.start() :])
        return Answer(Verdict.TOO_LARGE, code.name, message, max_bytes=limit)
    if code in RETRYABLE or (code is Code.RESOURCE_EXHAUSTED and delay is not None):
        return Answer(Verdict.RETRY, code.name, message, delay_s=delay)
    return Answer(Verdict.REFUSED, code.name, message)


def _read_status(response: Response) -> Status:
    # A response without a body has its status among the headers ("Trailers-Only").
    trailers = response.trailers if b"grpc-status" in response.trailers else response.headers
    if (number := trailers.get(b"grpc-status")) is not None:
        message = unquote(trailers.get(b"grpc-message", b"").decode("latin-1"), errors="replace")
        return Status(_parse_code(number), message, _read_details(trailers))
    if response.reset is not None:
        reset = _RESET_CODES.get(response.reset, Code.INTERNAL)
        return Status(reset, f"the receiver reset the stream with the error {response.reset}")
    http = response.headers.get(b":status", b"").decode("latin-1")
    shown = f"the receiver responded with HTTP status {http or 'unknown'} and no gRPC status"
    if http == "200":
        return Status(Code.INTERNAL, shown)
    code = _HTTP_CODES.get(int(http), Code.UNKNOWN) if http.isdigit() else Code.UNKNOWN
    text = response.body[:500].decode(errors="replace") if _is_text(response.headers) else ""
    return Status(code, f"{shown}: {text}" if text else shown)


def _parse_code(text: bytes) -> Code:
    try:
        return Code(int(text))
    except ValueError:
        return Code.UNKNOWN


def _is_grpc(headers: Headers) -> bool:
    kind = headers.get(b"content-type", b"")
    return headers.get(b":status") == b"200" and kind.startswith(b"application/grpc")


def _is_text(headers: Headers) -> bool:
    return headers.get(b"content-type", b"").startswith(b"text/plain")


def _read_details(trailers: Headers) -> bytes:
    text = trailers.get(b"grpc-status-details-bin", b"")
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4))
    except binascii.Error:  # the code alone then determines whether to retry
        return b""


def _read_message(response: Response, max_bytes: int) -> bytes:
    """Returns the message; raises ``ValueError``. Servers may encode it like the request."""
    body = response.body
    if not body:
        raise ValueError("it has no message")
    if int.from_bytes(body[1:_PREFIX_BYTES], "big") != len(body) - _PREFIX_BYTES:
        raise ValueError("it is not one message")
    message = bytes(body[_PREFIX_BYTES:])
    if not body[0]:
        return message
    encoding = response.headers.get(b"grpc-encoding", b"identity").decode("latin-1")
    return inflate(message, encoding, max_bytes)


def parse_limit(text: str) -> int:
    """Extracts the size limit in bytes from an error message; 0 if not found.

    Some messages also contain the request's size, which exceeds the limit.
    """
    numbers = [int(digits) for digits in re.findall(r"\d{1,18}", text)]
    return min((number for number in numbers if number >= _MIN_LIMIT_BYTES), default=0)


def parse_retry_delay(details: bytes) -> float | None:
    """Returns the delay in a status's ``RetryInfo``, in seconds; None if it has no ``RetryInfo``.

    A ``RetryInfo`` without a positive delay yields 0, because its presence allows a retry.
    """
    from google.protobuf.message import DecodeError  # noqa: PLC0415
    from google.rpc import error_details_pb2, status_pb2  # noqa: PLC0415

    try:
        for detail in status_pb2.Status.FromString(details).details:
            info = error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                delay = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
                return max(0.0, float(delay))
    except DecodeError:
        # If the details are unreadable, the status code alone determines whether to retry.
        return None
    return None
