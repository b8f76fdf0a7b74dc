"""Settings for OTLP exporters, shared by the configuration, SDK, commands and transports."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypedDict

from otel_kprofiler.errors import ExportError
from otel_kprofiler.export.retry import RetryPolicy
from otel_kprofiler.model import AttributeForm, Form, UnnamedFrames
from otel_kprofiler.otlp import DEVELOPMENT_VERSION, DEVELOPMENT_VERSION_HEADER

DEFAULT_MAX_BYTES: Final = 4 * 1024 * 1024 - 64 * 1024
"""Default maximum request size: gRPC's 4 MiB after decompression, minus a margin for headers."""


@dataclass(frozen=True, slots=True)
class Signal:
    """An OTLP signal (OTLP specification, "OTLP/gRPC" and "OTLP/HTTP Request").

    Attributes:
        missing: explanation that is shown if a receiver does not implement the method or path.
    """

    method: str
    path: str
    missing: str


PROFILES: Final = Signal(
    "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export",
    "/v1development/profiles",
    "it does not receive OTLP profiles; an OpenTelemetry Collector does when it is started with"
    " --feature-gates=service.profilesSupport and its otlp receiver is in a profiles pipeline",
)
METRICS: Final = Signal(
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    "/v1/metrics",
    "it does not receive OTLP metrics",
)

HEADER_NAME: Final = re.compile("[0-9A-Za-z_.-]+")
_RESERVED: Final = re.compile(
    "connection|content-type|grpc-.*|host|keep-alive|proxy-connection|te|transfer-encoding|upgrade"
)
"""Matches headers that HTTP/2 forbids (RFC 9113, 8.2.2) or that gRPC defines, in lower case."""

Protocol = Literal["grpc", "http/protobuf", "http/json"]
Compression = Literal["gzip", "none"]
GRPC_ENDPOINT: Final = "http://localhost:4317"
HTTP_ENDPOINT: Final = "http://localhost:4318"


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings, named as in the Collector; all files are in PEM format.

    Attributes:
        insecure: whether to connect without TLS if the endpoint has no scheme (gRPC only).
        ca_file: path of CA certificates to trust instead of the system's (``SSL_CERT_FILE``).
        cert_file: path of the client certificate; requires ``key_file``.
        key_file: path of the client's private key; requires ``cert_file``.
        insecure_skip_verify: whether to accept any certificate from the receiver.
    """

    insecure: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    insecure_skip_verify: bool = False

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Returns the contents of the CA, certificate and key files; None if a file is not set.

        Raises:
            ExportError: a file is unreadable, or only one of ``cert_file`` and ``key_file`` is set.
        """
        if bool(self.cert_file) != bool(self.key_file):
            raise ExportError(
                "the client certificate or its private key is missing",
                hint="set both cert_file and key_file, or neither",
            )
        return _read(self.ca_file), _read(self.cert_file), _read(self.key_file)


def _read(path: str | None) -> bytes | None:
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ExportError(
            f"cannot read the TLS file {path}: {error.strerror}",
            hint="use a PEM file that this user can read",
        ) from error


class ClientOptions(TypedDict, total=False):
    """Keyword arguments of the OTLP exporters; :class:`ClientSettings` describes them."""

    headers: Mapping[str, str]
    tls: Tls
    compression: Compression
    proxy_url: str | None
    timeout_s: float
    retry: RetryPolicy
    max_bytes: int | None
    attributes: AttributeForm
    unnamed_frames: UnnamedFrames
    development_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Settings for an OTLP exporter.

    ``repr`` omits addresses and headers, because they may contain credentials.

    Attributes:
        endpoint: address of the receiver. For gRPC, the endpoint is ``host:port``,
            ``http://host:port`` (plain text), ``https://host:port`` (TLS, regardless of
            ``tls.insecure``), or a target such as ``unix:///path``. For an endpoint without a
            scheme, TLS is used unless ``tls.insecure`` is set. For gRPC, the port defaults to 4317,
            or to 443 with https. For HTTP, ``/v1development/profiles`` is appended to the path of
            the address. An empty endpoint means port 4317 (gRPC) or 4318 (HTTP) on this host; see
            :func:`open_client`.
        exact: whether ``endpoint`` is used unchanged (HTTP only).
        headers: HTTP headers, or gRPC metadata, for each request.
        tls: TLS settings; for HTTP, the scheme of ``endpoint`` decides whether TLS is used.
        proxy_url: ``http://[user:password@]host:port``; empty for no proxy. gRPC does not use the
            proxy for receivers in ``NO_PROXY``. None selects the proxy from the environment for
            HTTP (``HTTPS_PROXY``, ``HTTP_PROXY``, ``NO_PROXY``), and no proxy for gRPC.
        timeout_s: time limit for one attempt, including the response, in seconds; > 0.
        max_bytes: maximum size of an uncompressed request in bytes; None for no limit.
        development_version: value of ``otlp-profiles-development-version``; empty to omit it.
    """

    protocol: Protocol = "grpc"
    endpoint: str = field(default="", repr=False)
    exact: bool = False
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: Tls = Tls()
    compression: Compression = "gzip"
    proxy_url: str | None = field(default=None, repr=False)
    timeout_s: float = 10.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    max_bytes: int | None = DEFAULT_MAX_BYTES
    attributes: AttributeForm = AttributeForm.INLINE
    unnamed_frames: UnnamedFrames = UnnamedFrames.ADDRESSES
    development_version: str = DEVELOPMENT_VERSION

    @property
    def form(self) -> Form:
        """Returns the request encoding: protobuf or JSON."""
        return Form.JSON if self.protocol == "http/json" else Form.PROTOBUF

    def checked_headers(self) -> dict[str, str]:
        """Returns the headers with lower-case names, validated for both transports.

        The headers include ``development_version``, unless it is empty or set in ``headers``.

        Raises:
            ExportError: a header's name or value has invalid characters, or gRPC reserves its name.
        """
        checked = {}
        if self.development_version:
            checked[DEVELOPMENT_VERSION_HEADER] = self.development_version
        for name, value in self.headers.items():
            # Values are often secrets, so the message contains only the name.
            if not HEADER_NAME.fullmatch(name) or not re.fullmatch(r"[ -~]*", value):
                raise ExportError(
                    f"the header {name!r} has invalid characters in its name or value",
                    hint="use letters, digits, -, _ and . in names, and printable ASCII in values",
                )
            if self.protocol == "grpc" and _RESERVED.fullmatch(name.lower()):
                raise ExportError(
                    f"the header {name!r} is reserved for gRPC", hint="remove it from headers"
                )
            checked[name.lower()] = value
        return checked

    def does_compress(self) -> bool:
        """Returns whether to compress requests; raises ``ExportError`` if misconfigured."""
        if self.compression not in {"gzip", "none"}:
            raise ExportError(f"unknown compression {self.compression!r}", hint="use gzip or none")
        return self.compression == "gzip"
