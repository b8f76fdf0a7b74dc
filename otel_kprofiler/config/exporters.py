"""``exporters:``, with the keys of the Collector's exporters of the same names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator

from otel_kprofiler.config import refused
from otel_kprofiler.config.durations import Duration
from otel_kprofiler.config.section import Section, duration

DEFAULT_MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024 - 64 * 1024
"""Just below gRPC's default limit of 4 MiB, with room for headers."""
_MIN_MESSAGE_BYTES: Final = 16 * 1024

ADDRESSES: Final = ("endpoint", "proxy_url")
"""Keys whose values may hold passwords."""

AttributesKey = Annotated[
    Literal["inline", "references"],
    Field(
        description="How keys and texts of resource and scope attributes are written. inline: in "
        "place. references: as indices into the string table. Requests are a quarter smaller "
        "before compression and hardly smaller after it, but Collectors up to v0.162, Pyroscope "
        "and Parca find empty keys."
    ),
]
"""As :class:`otel_kprofiler.model.AttributeForm`."""

_HOST_PORT: Final = re.compile(r"(?:dns:///)?(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]@]+):(\d{1,5})")
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2


def _check_header_name(value: str) -> str:
    if not _TOKEN.fullmatch(value):
        raise ValueError("should be the name of a header")
    return value


def _check_address(value: str, schemes: tuple[str, ...], example: str) -> str:
    try:
        url = urlsplit(value)
        usable = url.scheme in schemes and url.hostname and not url.query and not url.fragment
        _ = url.port  # raises when it is none
    except ValueError:  # whose text may show a password
        usable = False
    if not usable:
        raise ValueError(f"should be an address such as {example}")
    return value


class Tls(Section):
    """Encryption and identity; file names, PEM format."""

    ca_file: str = Field(
        default="",
        description="Certificates that the receiver's must be signed by. Empty: the system's.",
    )
    cert_file: str = Field(default="", description="Client certificate. Needs key_file.")
    key_file: str = Field(
        default="",
        validate_default=True,
        description="Key of the client certificate. Needs cert_file.",
    )

    @field_validator("key_file")
    @classmethod
    def _check_pair(cls, value: str, info: ValidationInfo) -> str:
        if bool(value) != bool(info.data.get("cert_file")):
            raise ValueError("cert_file and key_file go together")
        return value


class GrpcTls(Tls):
    """Encryption of a gRPC connection."""

    refused: ClassVar[Mapping[str, str]] = refused.GRPC_TLS

    insecure: bool = Field(
        default=False,
        description="Connect without TLS. A scheme in endpoint, http:// or https://, wins over it.",
        json_schema_extra={"example": True},
    )


class HttpTls(Tls):
    """Encryption of HTTPS."""

    refused: ClassVar[Mapping[str, str]] = refused.HTTP_TLS

    insecure_skip_verify: bool = Field(
        default=False,
        description="Accept any certificate. For tests: anyone in between can read along.",
    )


class RetryOnFailure(Section):
    """What happens when the receiver is unreachable or asks to come back later."""

    enabled: bool = Field(default=True, description="Retry at all.")
    initial_interval: Duration = duration("5s", "Wait before the first retry.", ge="1ms")
    randomization_factor: float = Field(
        default=0.5, ge=0, le=1, description="Each wait is this share longer or shorter, 0 to 1."
    )
    multiplier: float = Field(default=1.5, ge=1, description="Each wait is longer by this factor.")
    max_interval: Duration = duration("30s", "Longest wait.", ge="1ms")
    max_elapsed_time: Duration = duration(
        "5m", "Give a batch up after this time and count it as lost; 0s never gives up."
    )


class SendingQueue(Section):
    """Batches that wait for the exporter, in memory or on disk."""

    refused: ClassVar[Mapping[str, str]] = refused.QUEUE

    enabled: bool = Field(
        default=True,
        description="Keep batches while one is being sent. Without: room for one only.",
    )
    queue_size: int = Field(
        default=100,
        ge=1,
        le=100_000,
        description="Batches that may wait in memory; one more drops the oldest, which is "
        "counted. 100 are more than eight minutes at the default reporter_interval.",
    )
    storage: str = Field(
        default="",
        description="Directory where batches wait instead, across restarts and crashes; each "
        "exporter has its own below it. A batch stays there until the receiver has answered, "
        "whatever retry_on_failure says. Empty: in memory.",
    )
    max_megabytes: int = Field(
        default=1024,
        ge=1,
        description="Size of the directory; above it the oldest batches are dropped and counted.",
    )
    max_age: Duration = duration(
        "24h", "Batches in storage older than this are dropped and counted; 0s keeps them."
    )
    fsync: Literal["always", "never"] = Field(
        default="always",
        description="always: a stored batch survives a power failure. never: it survives the end "
        "of the process only.",
    )


class _Client(Section):
    endpoint: str  # declared here so that it comes first
    headers: dict[Annotated[str, AfterValidator(_check_header_name)], SecretStr] = Field(
        default={}, description="Sent with each request. Values are secrets: they are never shown."
    )
    compression: Literal["gzip", "none"] = Field(
        default="gzip", description="Compression of requests."
    )
    timeout: Duration = duration("5s", "Longest time for one attempt.", ge="1ms")
    retry_on_failure: RetryOnFailure = RetryOnFailure()
    sending_queue: SendingQueue = SendingQueue()
    max_message_bytes: int = Field(
        DEFAULT_MAX_MESSAGE_BYTES,
        ge=_MIN_MESSAGE_BYTES,
        description="Largest request in bytes before compression; more is split. The default is "
        "just below the limit of 4 MiB that gRPC receivers have.",
    )
    attributes: AttributesKey = "inline"

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, secret in value.items():
            if not secret.get_secret_value().isprintable():
                raise ValueError(f"the value of {name} holds control characters")
        return value


class OtlpGrpc(_Client):
    """OTLP over gRPC."""

    refused: ClassVar[Mapping[str, str]] = refused.GRPC

    endpoint: str = Field(
        description="Receiver as host:port, with or without http:// or https://, or unix:/path.",
        json_schema_extra={"example": "127.0.0.1:4317"},
    )
    proxy_url: str = Field(
        default="",
        description="Proxy to go through, http://host:port, unless NO_PROXY has the receiver. "
        "No other proxy variable of the environment is read.",
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


class OtlpHttp(_Client):
    """OTLP over HTTP."""

    refused: ClassVar[Mapping[str, str]] = refused.HTTP

    endpoint: str = Field(
        description="Base address of the receiver with http:// or https://; "
        "/v1development/profiles is appended.",
        json_schema_extra={"example": "http://127.0.0.1:4318"},
    )
    encoding: Literal["proto", "json"] = Field(default="proto", description="Form of the requests.")
    proxy_url: str = Field(
        default="",
        description="Proxy to go through. The proxy variables of the environment are not read.",
    )
    tls: HttpTls = HttpTls()

    @field_validator("endpoint", "proxy_url")
    @classmethod
    def _check_url(cls, value: str, info: ValidationInfo) -> str:
        if not value and info.field_name == "proxy_url":
            return value
        return _check_address(value, ("http", "https"), "https://collector.example:4318")


class Rotation(Section):
    """When a new file is begun and how many old ones stay; without it one file grows on."""

    refused: ClassVar[Mapping[str, str]] = refused.ROTATION

    max_megabytes: int = Field(
        default=100, ge=1, description="Begin a new file before one grows larger than this."
    )
    max_days: int = Field(
        default=0, ge=0, description="Delete old files after this many days; 0 keeps them."
    )
    max_backups: int = Field(
        default=100, ge=0, description="Keep at most this many old files; 0 keeps all."
    )


class File(Section):
    """A file that the Collector's otlpjsonfile receiver, or `otel-kprofiler`, can read."""

    refused: ClassVar[Mapping[str, str]] = refused.FILE

    path: str = Field(
        min_length=1,
        description="File to append to. One that is made is for its owner only, since unresolved "
        "frames tell kernel addresses; an existing one keeps its permissions.",
        json_schema_extra={"example": "/var/lib/otel-kprofiler/profiles.jsonl"},
    )
    format: Literal["json", "proto"] = Field(
        default="json",
        description="json: one OTLP JSON message per line. proto: OTLP messages, each behind its "
        "length in 4 bytes, big-endian.",
    )
    attributes: AttributesKey = "inline"
    rotation: Rotation | None = None


class Debug(Section):
    """Prints to standard output."""

    refused: ClassVar[Mapping[str, str]] = refused.DEBUG

    verbosity: Literal["basic", "normal", "detailed"] = Field(
        default="basic",
        description="basic: one line per batch. normal: one line per sample. detailed: everything.",
    )


Exporter = OtlpGrpc | OtlpHttp | File | Debug
EXPORTERS: Final[Mapping[str, type[OtlpGrpc | OtlpHttp | File | Debug]]] = {
    "otlp_grpc": OtlpGrpc,
    "otlp_http": OtlpHttp,
    "file": File,
    "debug": Debug,
}
"""Exporter types by the name that begins an exporter's id (``type`` or ``type/name``)."""
