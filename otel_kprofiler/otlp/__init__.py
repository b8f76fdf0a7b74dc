"""OTLP profiles: encode windows, decode them again, check payloads against every rule.

Encoding needs no protobuf library; decoding and checking load ``opentelemetry-proto`` (1.43
or later) at first use.
"""

from otel_kprofiler.otlp.conventions import SCHEMA_URL
from otel_kprofiler.otlp.encode import Encoded, Scope, encode_window

__all__ = ["SCHEMA_URL", "Encoded", "Scope", "encode_window"]
