"""Reads service attributes from the environment of a process, as OpenTelemetry's SDKs do.

According to the "Environment Variable Specification", ``OTEL_SERVICE_NAME`` takes precedence over
``service.name`` in ``OTEL_RESOURCE_ATTRIBUTES``. The values in ``OTEL_RESOURCE_ATTRIBUTES`` are
percent-encoded, and the variable is ignored if any part of it is malformed.
"""

import os
from typing import Final
from urllib.parse import unquote_to_bytes

from otel_kprofiler.host import HostFiles, read_limited
from otel_kprofiler.model import AttributeValue
from otel_kprofiler.text import escape_surrogates

_MAX_BYTES: Final = 256 * 1024
"""Maximum number of bytes read from an environment."""
_MAX_VALUE_BYTES: Final = 16 * 1024
_NAME: Final = b"OTEL_SERVICE_NAME="
_ATTRIBUTES: Final = b"OTEL_RESOURCE_ATTRIBUTES="
_TAKEN: Final = ("service.", "deployment.")
"""Name prefixes of accepted attributes. Attributes that describe where a process runs are not
accepted."""


def parse_environment(environ: bytes) -> dict[str, AttributeValue]:
    """Parses service attributes in ``/proc/PID/environ``; never raises."""
    if b"OTEL_" not in environ:
        return {}
    # getenv(3) returns the first of duplicate variables.
    name = attributes = b""
    for entry in reversed(environ.split(b"\0")):
        if entry.startswith(_NAME):
            name = entry[len(_NAME) :]
        elif entry.startswith(_ATTRIBUTES):
            attributes = entry[len(_ATTRIBUTES) :]
    parsed = _parse_attributes(attributes)
    if name and len(name) <= _MAX_VALUE_BYTES:
        parsed["service.name"] = escape_surrogates(os.fsdecode(name))
    return parsed


def _parse_attributes(text: bytes) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {}
    if not text.strip() or len(text) > _MAX_VALUE_BYTES:
        return attributes
    for pair in text.split(b","):
        key, equals, value = pair.partition(b"=")
        if not equals or not key.strip():
            return {}
        try:
            attributes[key.strip().decode("ascii")] = unquote_to_bytes(value.strip()).decode()
        except UnicodeDecodeError:
            return {}
    return {key: value for key, value in attributes.items() if value and key.startswith(_TAKEN)}


def read_environment(files: HostFiles, pid: int) -> dict[str, AttributeValue]:
    """Reads service attributes from the initial environment of a process; empty if unreadable.

    Reads the process's memory, which requires permission to trace the process, and can block.
    """
    try:
        return parse_environment(read_limited(files, f"/proc/{pid}/environ", _MAX_BYTES))
    except OSError:
        return {}
