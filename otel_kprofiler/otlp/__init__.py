"""OTLP profiles: encode and decode windows, check payloads against every rule.

Encoding needs no protobuf library. Decoding and checking load ``opentelemetry-proto`` on first use
and raise ``DependencyError`` if it is missing or older than 1.43.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from otel_kprofiler.otlp.conventions import (
    KERNEL_ENTRY,
    KERNEL_THREAD,
    LOCAL_ROOT,
    SAMPLE_ATTRIBUTES,
    SCHEMA_URL,
    UNIT,
    USER_UNIT,
    WAIT_CAUSE,
    WAIT_STATE,
)
from otel_kprofiler.otlp.encode import Encoded, Scope, encode_empty, encode_window
from otel_kprofiler.otlp.process_context import (
    ProcessContext,
    decode_process_context,
    encode_process_context,
)

if TYPE_CHECKING:
    from otel_kprofiler.otlp.check import RULES, Violation, check_file, check_payload
    from otel_kprofiler.otlp.decode import decode_windows, read_profiles
    from otel_kprofiler.otlp.nameless import Nameless, NamelessFile, Naming, name_locations
    from otel_kprofiler.otlp.payloads import DamagedProfilesError, parse_payloads, read_file
    from otel_kprofiler.otlp.split import encode_message

__all__ = [
    "KERNEL_ENTRY",
    "KERNEL_THREAD",
    "LOCAL_ROOT",
    "RULES",
    "SAMPLE_ATTRIBUTES",
    "SCHEMA_URL",
    "UNIT",
    "USER_UNIT",
    "WAIT_CAUSE",
    "WAIT_STATE",
    "DamagedProfilesError",
    "Encoded",
    "Nameless",
    "NamelessFile",
    "Naming",
    "ProcessContext",
    "Scope",
    "Violation",
    "check_file",
    "check_payload",
    "decode_process_context",
    "decode_windows",
    "encode_empty",
    "encode_message",
    "encode_process_context",
    "encode_window",
    "name_locations",
    "parse_payloads",
    "read_file",
    "read_profiles",
]

_LATE: Final = {
    "DamagedProfilesError": "payloads",
    "Nameless": "nameless",
    "NamelessFile": "nameless",
    "Naming": "nameless",
    "RULES": "check",
    "Violation": "check",
    "check_file": "check",
    "check_payload": "check",
    "decode_windows": "decode",
    "encode_message": "split",
    "name_locations": "nameless",
    "parse_payloads": "payloads",
    "read_file": "payloads",
    "read_profiles": "decode",
}


def __getattr__(name: str) -> Any:
    """Import modules that need protobuf on first use."""
    if name not in _LATE:
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
