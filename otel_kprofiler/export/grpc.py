"""Sends OTLP over gRPC: ``ProfilesService/Export`` with the bytes of the batch."""

import dataclasses
import functools
import ssl
from typing import Unpack
from urllib.parse import urlsplit

from otel_kprofiler.errors import ExportError
from otel_kprofiler.export.client import (
    GRPC_ENDPOINT,
    PROFILES,
    ClientOptions,
    ClientSettings,
    Signal,
    Tls,
)
from otel_kprofiler.export.grpc_channel import GrpcChannel
from otel_kprofiler.export.grpc_target import parse_target
from otel_kprofiler.export.retry import Answer
from otel_kprofiler.export.sender import MAX_RESPONSE_BYTES, OtlpSender, user_agent
from otel_kprofiler.export.tls_files import NO_PASSWORD, TlsFiles
from otel_kprofiler.model import Batch
from otel_kprofiler.redact import Secrets, redact_address


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
        self._tls_files = TlsFiles(settings.tls) if secure else None
        self._channel = GrpcChannel(
            parse_target(target),
            make_context=functools.partial(_make_context, settings.tls) if secure else None,
            proxy_url=proxy_url,
            metadata={"user-agent": user_agent(), **settings.checked_headers()},
            compresses=settings.does_compress(),
            max_bytes=MAX_RESPONSE_BYTES,
        )

    def _prepare(self, batch: Batch) -> bytes:
        return self._channel.frame(batch.payload)

    def _attempt(self, body: bytes, timeout_s: float) -> Answer:
        if self._tls_files and self._tls_files.renew():
            self._channel.disconnect()
        return self._channel.call(self._signal.method, body, timeout_s)

    def _close(self) -> None:
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


def _make_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca_file)
    if tls.insecure_skip_verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if tls.cert_file and tls.key_file:
        context.load_cert_chain(tls.cert_file, tls.key_file, NO_PASSWORD)
    return context
