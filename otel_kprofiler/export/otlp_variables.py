"""Reads the ``OTEL_EXPORTER_OTLP_[PROFILES_]*`` environment variables.

Variables with ``PROFILES_`` in the name take precedence, and an empty value counts as unset. The
variables have the same meaning as for Python's other OTLP exporters: ``TIMEOUT`` is in seconds and
covers all attempts for a batch, and the default protocol is grpc.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

from otel_kprofiler.errors import ConfigError, ConfigProblem
from otel_kprofiler.export.client import ClientSettings, Compression, Protocol, Tls
from otel_kprofiler.export.exporter_settings import open_client
from otel_kprofiler.export.retry import RetryPolicy
from otel_kprofiler.export.sender import OtlpSender
from otel_kprofiler.redact import redact_address

PROTOCOLS: Final[tuple[Protocol, ...]] = ("grpc", "http/protobuf", "http/json")
COMPRESSIONS: Final[tuple[Compression, ...]] = ("none", "gzip")
Value = TypeVar("Value", bound=str)
_GENERAL: Final = "OTEL_EXPORTER_OTLP_"
_SIGNAL: Final = "OTEL_EXPORTER_OTLP_PROFILES_"
_PATH: Final = "v1development/profiles"


def read_settings(environ: Mapping[str, str] = os.environ) -> ClientSettings:
    """Returns the settings in ``environ``; raises ``ConfigError``, which lists all problems."""
    problems: list[ConfigProblem] = []

    def text(option: str) -> tuple[str, str]:
        """Returns the name and value of an option's environment variable; empty if it is unset."""
        for name in (_SIGNAL + option, _GENERAL + option):
            if value := environ.get(name, "").strip():
                return name, value
        return "", ""

    def refuse(name: str, message: str) -> None:
        problems.append(ConfigProblem("environment", 0, 0, name, message))

    def choice(option: str, allowed: tuple[Value, ...], default: Value) -> Value:
        name, value = text(option)
        for choice in allowed:
            if value.lower() == choice:
                return choice
        if value:
            refuse(name, f"is {value!r}; it must be one of {', '.join(allowed)}")
        return default

    def seconds(option: str, default: float) -> float:
        name, value = text(option)
        try:
            number = float(value or default)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            refuse(name, f"is {value!r}; it must be a number of seconds above 0")
        return number

    def headers(option: str) -> dict[str, str]:
        name, value = text(option)
        parsed = {}
        for pair in filter(str.strip, value.split(",")):
            key, separator, content = pair.partition("=")
            if not separator or not key.strip():
                refuse(name, "must be comma-separated key=value pairs")
                break
            parsed[unquote(key).strip().lower()] = unquote(content).strip()
        return parsed

    endpoint_name, endpoint = text("ENDPOINT")
    timeout_s = seconds("TIMEOUT", 10.0)
    settings = ClientSettings(
        protocol=choice("PROTOCOL", PROTOCOLS, "grpc"),
        endpoint=endpoint,
        exact=endpoint_name.startswith(_SIGNAL),
        headers=headers("HEADERS"),
        timeout_s=timeout_s,
        retry=RetryPolicy(max_elapsed_time_s=timeout_s),
        compression=choice("COMPRESSION", COMPRESSIONS, "none"),
        tls=Tls(
            insecure=choice("INSECURE", ("true", "false"), "false") == "true",
            ca_file=text("CERTIFICATE")[1] or None,
            cert_file=text("CLIENT_CERTIFICATE")[1] or None,
            key_file=text("CLIENT_KEY")[1] or None,
        ),
    )
    if problems:
        raise ConfigError(problems, hint="correct the environment variables, or unset them")
    return settings


def exporter_from_environment(
    address: str | None = None, environ: Mapping[str, str] = os.environ
) -> OtlpSender:
    """Create an OTLP exporter from environment variables.

    ``address`` overrides the endpoint from the environment. ``address`` is ``grpc://host:port``
    (plain text), ``grpcs://host:port`` (TLS), or an ``http://`` or ``https://`` address for OTLP
    over HTTP. For HTTP, the signal's path is appended unless the address ends with it.

    Raises:
        ConfigError: a variable has an invalid value, or the address has an unsupported form.
        ExportError: the endpoint, a header or a file is unusable.
    """
    settings = read_settings(environ)
    if address is not None:
        scheme, _, rest = address.partition("://")
        if scheme in {"grpc", "grpcs"}:
            endpoint = f"http{scheme[4:]}://{rest}"
            settings = dataclasses.replace(settings, protocol="grpc", endpoint=endpoint)
        elif scheme in {"http", "https"}:
            protocol = "http/protobuf" if settings.protocol == "grpc" else settings.protocol
            exact = urlsplit(address).path.endswith(_PATH)
            settings = dataclasses.replace(
                settings, protocol=protocol, endpoint=address, exact=exact
            )
        else:
            shown = redact_address(address)
            problem = ConfigProblem(
                "command line", 0, 0, "", f"{shown} is not a valid receiver address"
            )
            raise ConfigError(
                [problem], hint="write grpc://HOST:PORT, grpcs://…, http://… or https://…"
            )
    return open_client(settings)
