"""Reads OTLP exporter settings from the OpenTelemetry SDK's declarative configuration."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, Final

from otel_kprofiler.errors import ConfigError, ConfigProblem
from otel_kprofiler.export import ClientSettings, Protocol, RetryPolicy, Tls

_VARIABLE: Final = "OTEL_CONFIG_FILE"
_MODELS: Final = "opentelemetry.configuration.models"
_DEFAULT_TIMEOUT_MS: Final = 10_000
_SIGNAL_PATHS: Final = ("/v1/traces", "/v1/metrics", "/v1/logs")


def find_applied_configuration() -> Any:
    """Returns the configuration that the SDK is currently applying; None if there is none.

    The SDK passes each instrumentor only that instrumentor's options. This function therefore
    searches the call stack for the SDK function that holds all settings in a local variable.
    """
    models = sys.modules.get(_MODELS)
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - no public equivalent
    while models is not None and frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, models.OpenTelemetryConfiguration):
                return value
        frame = frame.f_back
    return None


def read_configuration_file(environ: Mapping[str, str]) -> ClientSettings | None:
    """Reads OTLP settings from ``OTEL_CONFIG_FILE``. Raises ``ConfigError`` for an invalid file."""
    path = environ.get(_VARIABLE)
    if not path:
        return None
    try:
        load = importlib.import_module("opentelemetry.configuration").load_config_file
    except ImportError:
        return None  # the SDK reports the missing package
    try:
        return find_otlp_settings(load(path))
    except Exception as error:
        raise ConfigError(
            [ConfigProblem(path, 0, 0, _VARIABLE, str(error))], hint="correct the file"
        ) from error


def find_otlp_settings(configuration: Any) -> ClientSettings | None:
    """Returns settings for profiles, based on the first OTLP exporter for another signal."""
    for exporter in _exporters(configuration):
        if (http := getattr(exporter, "otlp_http", None)) is not None:
            encoding = getattr(getattr(http, "encoding", None), "value", "protobuf")
            return _settings(http, "http/json" if encoding == "json" else "http/protobuf")
        if (grpc := getattr(exporter, "otlp_grpc", None)) is not None:
            return _settings(grpc, "grpc")
    return None


def _exporters(configuration: Any) -> Iterator[Any]:
    parts: list[Any] = []
    for provider in (configuration.tracer_provider, configuration.logger_provider):
        parts += provider.processors if provider is not None else ()
    if configuration.meter_provider is not None:
        parts += configuration.meter_provider.readers
    for part in parts:
        for kind in ("batch", "simple", "periodic"):
            if (configured := getattr(part, kind, None)) is not None:
                yield configured.exporter


def _settings(exporter: Any, protocol: Protocol) -> ClientSettings:
    endpoint = exporter.endpoint or ""
    if protocol != "grpc":
        for path in _SIGNAL_PATHS:
            endpoint = endpoint.removesuffix(path)
    tls = exporter.tls
    timeout_s = (exporter.timeout or _DEFAULT_TIMEOUT_MS) / 1000
    return ClientSettings(
        protocol=protocol,
        endpoint=endpoint,
        headers=_headers(exporter),
        timeout_s=timeout_s,
        retry=RetryPolicy(max_elapsed_time_s=timeout_s),
        compression="none" if exporter.compression in {None, "none"} else "gzip",
        tls=Tls(
            insecure=bool(getattr(tls, "insecure", False)),
            ca_file=getattr(tls, "ca_file", None),
            cert_file=getattr(tls, "cert_file", None),
            key_file=getattr(tls, "key_file", None),
        ),
    )


def _headers(exporter: Any) -> dict[str, str]:
    headers = {}
    for pair in filter(str.strip, (exporter.headers_list or "").split(",")):
        name, _, value = pair.partition("=")
        headers[name.strip().lower()] = value.strip()
    for header in exporter.headers or ():
        headers[header.name.lower()] = header.value or ""
    return headers
