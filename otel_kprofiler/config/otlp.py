"""The schemas of ``otlp_grpc:`` and ``otlp_http:``, with the keys of the Collector's exporters."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator

from otel_kprofiler.config import unsupported_keys
from otel_kprofiler.config.durations import Duration
from otel_kprofiler.config.section import MEBIBYTE, AttributesKey, Exporter, Section, duration
from otel_kprofiler.errors import ExportError
from otel_kprofiler.export import (
    DEFAULT_MAX_BYTES,
    HEADER_NAME,
    ClientSettings,
    OtlpSettings,
    Protocol,
    QueueSettings,
    RetryPolicy,
    SpoolSettings,
)
from otel_kprofiler.export import Tls as TlsSettings
from otel_kprofiler.model import AttributeForm, UnnamedFrames

_MIN_MESSAGE_BYTES: Final = 16 * 1024
_MAX_MESSAGE_BYTES: Final = 128 * 1024 * 1024
"""Upper limit for ``max_message_bytes``: half the maximum size of a spool record."""

ADDRESSES: Final = ("endpoint", "proxy_url")
"""Keys whose values may contain passwords."""

_HOST_PORT: Final = re.compile(r"(?:dns:///)?(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]@]+):(\d{1,5})")


def _check_header_name(value: str) -> str:
    if not HEADER_NAME.fullmatch(value):
        raise ValueError("should be a header name")
    return value


def _check_address(value: str, schemes: tuple[str, ...], example: str) -> str:
    try:
        url = urlsplit(value)
        usable = url.scheme in schemes and url.hostname and not url.query and not url.fragment
        _ = url.port  # raises if invalid
    except ValueError:  # the error's text may contain a password
        usable = False
    if not usable:
        raise ValueError(f"should be a URL such as {example}")
    return value


class Tls(Section):
    """TLS. Certificates and keys are files in PEM format."""

    ca_file: str = Field(
        default="",
        description="File with the CA certificates for verifying the receiver. If empty, the "
        "system's CA certificates are used, or those in the file that SSL_CERT_FILE names.",
    )
    cert_file: str = Field(
        default="", description="File with the client certificate. Needs key_file."
    )
    key_file: str = Field(
        default="",
        validate_default=True,
        description="File with the client certificate's private key. Needs cert_file.",
    )
    insecure_skip_verify: bool = Field(
        default=False,
        description="Accept any certificate. Use this setting only for testing, because "
        "it allows man-in-the-middle attacks.",
    )

    @field_validator("key_file")
    @classmethod
    def _check_pair(cls, value: str, info: ValidationInfo) -> str:
        if bool(value) != bool(info.data.get("cert_file")):
            raise ValueError("cert_file and key_file must be set together")
        return value

    def settings(self) -> TlsSettings:
        """Returns the exporter's TLS settings."""
        return TlsSettings(
            ca_file=self.ca_file or None,
            cert_file=self.cert_file or None,
            key_file=self.key_file or None,
            insecure_skip_verify=self.insecure_skip_verify,
        )


class GrpcTls(Tls):
    """TLS settings for gRPC connections."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.TLS

    insecure: bool = Field(
        default=False,
        description="Connect without TLS. If endpoint has a scheme, the scheme takes precedence.",
        json_schema_extra={"example": True},
    )

    def settings(self) -> TlsSettings:
        """Returns the exporter's TLS settings."""
        return replace(super().settings(), insecure=self.insecure)


class HttpTls(Tls):
    """TLS settings for HTTPS connections."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.HTTP_TLS


class RetryOnFailure(Section):
    """Retries when the receiver is unreachable or overloaded."""

    enabled: bool = Field(default=True, description="Whether to retry failed requests.")
    initial_interval: Duration = duration("5s", "Delay before the first retry.", ge="1ms")
    randomization_factor: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Random variation of each delay, as a fraction of the delay, 0 to 1.",
    )
    multiplier: float = Field(
        default=1.5, ge=1, description="Factor by which the delay grows after each retry."
    )
    max_interval: Duration = duration("30s", "Maximum delay between retries.", ge="1ms")
    max_elapsed_time: Duration = duration(
        "5m",
        "Time after which a batch is dropped and counted as lost. With 0s, the exporter "
        "retries forever.",
    )

    def settings(self) -> RetryPolicy:
        """Returns the retry policy of the exporter."""
        return RetryPolicy(
            enabled=self.enabled,
            initial_interval_s=self.initial_interval.seconds,
            multiplier=self.multiplier,
            randomization_factor=self.randomization_factor,
            max_interval_s=self.max_interval.seconds,
            max_elapsed_time_s=self.max_elapsed_time.seconds,
        )


class SendingQueue(Section):
    """The exporter's queue, in memory or on disk."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.QUEUE

    enabled: bool = Field(
        default=True,
        description="Whether to queue more than one batch.",
    )
    queue_size: int = Field(
        default=100,
        ge=1,
        le=100_000,
        description="Maximum number of batches in memory. When the queue is full, the oldest batch "
        "is dropped and counted as lost. 100 batches cover eight minutes at the default "
        "reporter_interval.",
    )
    storage: str = Field(
        default="",
        description="Directory for an on-disk queue that survives restarts and crashes. Each "
        "exporter has a subdirectory. A batch remains on disk until the receiver has responded, "
        "regardless of retry_on_failure. If empty, the queue is kept in memory.",
    )
    max_megabytes: int = Field(
        default=1024,
        ge=1,
        description="Maximum size of the exporter's subdirectory. Above this size, the oldest "
        "batches are dropped and counted as lost.",
    )
    max_age: Duration = duration(
        "24h",
        "Age at which stored batches are dropped and counted as lost. With 0s, batches are "
        "kept regardless of their age.",
    )
    fsync: Literal["always", "never"] = Field(
        default="always",
        description="When to flush stored batches to disk. always: a stored batch survives a power "
        "failure. never: a stored batch survives a crash of the agent, but not a power failure.",
    )

    def settings(self) -> QueueSettings:
        """Returns the queue's settings."""
        if not self.enabled:
            return QueueSettings(1)
        if not self.storage:
            return QueueSettings(self.queue_size)
        spool = SpoolSettings(
            directory=self.storage,
            max_bytes=self.max_megabytes * MEBIBYTE,
            max_age_s=self.max_age.seconds,
            fsync=self.fsync == "always",
        )
        return QueueSettings(self.queue_size, spool)


def _reveal(headers: Mapping[str, SecretStr]) -> dict[str, str]:
    return {name: value.get_secret_value() for name, value in headers.items()}


class _Client(Exporter):
    transport: ClassVar[Protocol] = "http/protobuf"

    endpoint: str  # declared here, so that it is the first key
    headers: dict[Annotated[str, AfterValidator(_check_header_name)], SecretStr] = Field(
        default={},
        description="Headers for each request. Values are treated as secrets and never shown.",
    )
    compression: Literal["gzip", "none"] = Field(
        default="gzip", description="Compression of requests."
    )
    timeout: Duration = duration("5s", "Time limit for each attempt to send a request.", ge="1ms")
    retry_on_failure: RetryOnFailure = RetryOnFailure()
    sending_queue: SendingQueue = SendingQueue()
    max_message_bytes: int = Field(
        DEFAULT_MAX_BYTES,
        ge=_MIN_MESSAGE_BYTES,
        le=_MAX_MESSAGE_BYTES,
        description="Maximum size of an uncompressed request in bytes. Larger batches are "
        "split. If the receiver still rejects a request as too large, the request is split again. "
        "The default is just below the 4 MiB limit in gRPC receivers.",
    )
    attributes: AttributesKey = "inline"
    unnamed_frames: Literal["addresses", "names"] = Field(
        default="addresses",
        description="How to send frames without a function name. addresses: with file and address "
        "only, for back ends that symbolize. names: also with a name composed of file, address and "
        "reason, such as vmlinux+0x1234 [no_symbol], for back ends that drop unnamed frames, such "
        "as Pyroscope.",
    )

    development_version: str = Field(
        default="1",
        pattern=r"^([1-9][0-9]{0,8})?$",
        description="Value of the otlp-profiles-development-version header, which specifies the "
        "version of the profiles schema. Collectors since v0.163 reject versions that they do "
        "not support. If empty, the header is not sent, and receivers assume version 1.",
    )
    proxy_url: str  # each transport adds a description

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        try:
            ClientSettings(protocol=cls.transport, headers=_reveal(value)).checked_headers()
        except ExportError as error:
            raise ValueError(error.with_fix()) from error
        return value

    def _settings(self, protocol: Protocol, tls: Tls) -> OtlpSettings:
        client = ClientSettings(
            protocol=protocol,
            endpoint=self.endpoint,
            headers=_reveal(self.headers),
            tls=tls.settings(),
            compression=self.compression,
            proxy_url=self.proxy_url,
            timeout_s=self.timeout.seconds,
            retry=self.retry_on_failure.settings(),
            max_bytes=self.max_message_bytes,
            attributes=AttributeForm(self.attributes),
            unnamed_frames=UnnamedFrames(self.unnamed_frames),
            development_version=self.development_version,
        )
        return OtlpSettings(client=client, queue=self.sending_queue.settings())


class OtlpGrpc(_Client):
    """Sends profiles as OTLP over gRPC."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.GRPC
    transport: ClassVar[Protocol] = "grpc"

    endpoint: str = Field(
        description="Address of the receiver: host:port, http://host:port, https://host:port or "
        "unix:/path.",
        json_schema_extra={"example": "127.0.0.1:4317"},
    )
    proxy_url: str = Field(
        default="",
        description="Address of the proxy: http://host:port. The proxy is not used for receivers "
        "in NO_PROXY. Other proxy variables in the environment are ignored.",
    )
    tls: GrpcTls = GrpcTls()

    @field_validator("proxy_url")
    @classmethod
    def _check_proxy(cls, value: str) -> str:
        return _check_address(value, ("http",), "http://proxy.example:3128") if value else value

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if re.fullmatch(r"unix:(//)?/\S+", value):
            return value
        match = _HOST_PORT.fullmatch(re.sub(r"^https?://", "", value).rstrip("/"))
        if match is None or not 0 < int(match[1]) < 65536:
            raise ValueError("should be host:port, such as 127.0.0.1:4317")
        return value

    def settings(self) -> OtlpSettings:
        """Returns the settings for opening the exporter."""
        return self._settings("grpc", self.tls)


class OtlpHttp(_Client):
    """Sends profiles as OTLP over HTTP."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.HTTP

    endpoint: str = Field(
        description="Base URL of the receiver, with http:// or https://. The exporter appends "
        "/v1development/profiles.",
        json_schema_extra={"example": "http://127.0.0.1:4318"},
    )
    encoding: Literal["proto", "json"] = Field(default="proto", description="Encoding of requests.")
    proxy_url: str = Field(
        default="", description="URL of the proxy. Proxy variables in the environment are ignored."
    )
    tls: HttpTls = HttpTls()

    @field_validator("endpoint", "proxy_url")
    @classmethod
    def _check_url(cls, value: str, info: ValidationInfo) -> str:
        if not value and info.field_name == "proxy_url":
            return value
        return _check_address(value, ("http", "https"), "https://collector.example:4318")

    def settings(self) -> OtlpSettings:
        """Returns the settings for opening the exporter."""
        return self._settings("http/json" if self.encoding == "json" else "http/protobuf", self.tls)
