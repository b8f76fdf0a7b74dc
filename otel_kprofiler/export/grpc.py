"""Sends OTLP over gRPC: ``ProfilesService/Export`` with the bytes of the batch.

grpcio makes blocking unary calls without an extra thread, and closing the channel aborts them.
gRPC's own retries are disabled, because :mod:`.retry` implements retries.
"""

import dataclasses
import functools
import re
import threading
from typing import Final, Unpack, cast
from urllib.parse import urlsplit

import grpc
from grpc import StatusCode

from otel_kprofiler.errors import ExportError
from otel_kprofiler.export.client import (
    GRPC_ENDPOINT,
    PROFILES,
    ClientOptions,
    ClientSettings,
    Signal,
)
from otel_kprofiler.export.partial_success import parse_partial_success
from otel_kprofiler.export.retry import Answer, Verdict
from otel_kprofiler.export.sender import MAX_RESPONSE_BYTES, OtlpSender, user_agent
from otel_kprofiler.export.tls_files import TlsFiles
from otel_kprofiler.model import Batch
from otel_kprofiler.redact import Secrets, redact_address

RETRYABLE: Final = frozenset(
    {
        StatusCode.CANCELLED,
        StatusCode.DEADLINE_EXCEEDED,
        StatusCode.ABORTED,
        StatusCode.OUT_OF_RANGE,
        StatusCode.UNAVAILABLE,
        StatusCode.DATA_LOSS,
    }
)
"""The codes that OTLP defines as retryable, besides RESOURCE_EXHAUSTED with RetryInfo."""
_TOO_LARGE: Final = re.compile(
    r"message[ \w]*? larger than max|message exceeds (the )?(configured )?max|larger than max size"
    r"|message length too large|status: 413|(payload|entity) too large",
    re.IGNORECASE,
)
"""Matches errors about requests that are too large. In order, the alternatives match messages from
gRPC for Go, C++, Python and Ruby; gRPC for Java and .NET; tonic; and HTTP proxies."""
_TOO_LARGE_CODES: Final = frozenset(
    {
        StatusCode.RESOURCE_EXHAUSTED,
        StatusCode.OUT_OF_RANGE,
        StatusCode.INVALID_ARGUMENT,
        StatusCode.INTERNAL,
        StatusCode.UNKNOWN,
    }
)
_MIN_LIMIT_BYTES: Final = 1024
"""Smallest number in an error message that is interpreted as a size limit, in bytes."""
_LARGE_RESPONSE: Final = "CLIENT: Received message larger than max"
"""gRPC core's message for a response over our limit; the server has accepted the request."""
Options = tuple[tuple[str, str | int], ...]
_OPTIONS: Final[Options] = (
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    # By default, gRPC waits up to two minutes before it reconnects.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Two exporters with the same address must not share a connection.
    ("grpc.use_local_subchannel_pool", 1),
)


class OtlpGrpcExporter(OtlpSender):
    """Sends protobuf batches over gRPC.

    Args:
        endpoint: address of the receiver, or a :class:`ClientSettings` with all settings.
        options: other settings, by name; see :class:`ClientSettings`.

    Raises:
        ExportError: the endpoint, a header, the compression or a TLS file is invalid.
    """

    def __init__(
        self,
        endpoint: str | ClientSettings = GRPC_ENDPOINT,
        *,
        name: str = "otlp_grpc",
        signal: Signal = PROFILES,
        **options: Unpack[ClientOptions],
    ) -> None:
        if isinstance(endpoint, str):
            endpoint = ClientSettings(protocol="grpc", endpoint=endpoint)
        settings = dataclasses.replace(endpoint, **options)
        proxy_url = settings.proxy_url or ""
        target, secure = parse_endpoint(settings.endpoint, insecure=settings.tls.insecure)
        super().__init__(
            name,
            settings,
            signal=signal,
            endpoint=redact_address(target),
            secrets=Secrets([target, proxy_url], settings.headers),
        )
        self._metadata = tuple(settings.checked_headers().items())
        self._tls_files = TlsFiles(settings.tls) if secure else None
        self._open = functools.partial(
            _open_channel,
            target,
            self._tls_files,
            (*_OPTIONS, ("grpc.primary_user_agent", user_agent()), *_proxy_options(proxy_url)),
            compresses=settings.does_compress(),
        )
        self._lock = threading.Lock()
        self._channel = self._open()

    def _prepare(self, batch: Batch) -> bytes:
        return batch.payload

    def _attempt(self, body: bytes, timeout_s: float) -> Answer:
        if self._tls_files and self._tls_files.renew():
            self._reopen()
        # No serializers, because batches are already encoded.
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            self._signal.method
        )
        try:
            response = call(body, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            return _failed(error)
        except ValueError as error:
            # grpcio raises ValueError if another thread has closed the channel.
            if not self._stop.is_set():
                raise
            return Answer(Verdict.RETRY, "CANCELLED", str(error))
        try:
            partial = parse_partial_success(response)
        except ValueError as error:
            return Answer(Verdict.ACCEPTED, "OK", unreadable=str(error))
        return Answer(Verdict.ACCEPTED, "OK", partial.message, partial.rejected)

    def _reopen(self) -> None:
        with self._lock:
            if not self._closed:
                old, self._channel = self._channel, self._open()
                old.close()

    def _close(self) -> None:
        with self._lock:
            self._channel.close()


def parse_endpoint(endpoint: str, *, insecure: bool) -> tuple[str, bool]:
    """Returns the gRPC target, and whether to use TLS; raises ``ExportError`` if malformed."""
    scheme, separator, _ = endpoint.partition("://")
    if (separator and scheme not in {"http", "https"}) or endpoint.startswith("unix:"):
        return endpoint, not insecure
    try:
        url = urlsplit(endpoint if separator else f"//{endpoint}")
        host, port, clean = url.hostname, url.port, url.path in {"", "/"} and not url.query
    except ValueError:
        host, clean = None, False
    if not host or not clean or "@" in url.netloc:
        raise ExportError(
            f"{redact_address(endpoint)!r} is not a valid gRPC endpoint",
            hint="write it as host:port, http://host:port or https://host:port, without a path;"
            " credentials belong in headers",
        )
    secure = scheme == "https" if separator else not insecure
    if port is None and scheme != "https":
        return f"{url.netloc}:4317", secure
    return url.netloc, secure


def _proxy_options(proxy_url: str) -> Options:
    """Returns options that override the environment's proxy, which could read gRPC metadata."""
    if not proxy_url:
        return (("grpc.enable_http_proxy", 0),)
    return (("grpc.enable_http_proxy", 1), ("grpc.http_proxy", proxy_url))


def _open_channel(
    target: str, files: TlsFiles | None, options: Options, *, compresses: bool
) -> grpc.Channel:
    compression = grpc.Compression.Gzip if compresses else grpc.Compression.NoCompression
    if files is None:
        return grpc.insecure_channel(target, options=options, compression=compression)
    ca, certificate, key = files.contents
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    return grpc.secure_channel(target, credentials, options=options, compression=compression)


def _failed(error: grpc.RpcError) -> Answer:
    # Blocking calls raise an error that is also a Call, which the type stubs do not declare.
    call = cast("grpc.Call", error)
    code, message = call.code(), call.details() or ""
    delay = None
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            delay = parse_retry_delay(value)
    if code is StatusCode.RESOURCE_EXHAUSTED and _LARGE_RESPONSE in message:
        return Answer(Verdict.ACCEPTED, "OK", unreadable=message)
    if code in _TOO_LARGE_CODES and delay is None and (match := _TOO_LARGE.search(message)):
        limit = parse_limit(message[match.start() :])
        return Answer(Verdict.TOO_LARGE, code.name, message, max_bytes=limit)
    if code in RETRYABLE or (code is StatusCode.RESOURCE_EXHAUSTED and delay is not None):
        return Answer(Verdict.RETRY, code.name, message, delay_s=delay)
    return Answer(Verdict.REFUSED, code.name, message)


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
