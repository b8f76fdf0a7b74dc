"""Maps exporter types to their configuration schemas."""

from typing import Final

from otel_kprofiler.config.debug import Debug
from otel_kprofiler.config.file import File
from otel_kprofiler.config.otlp import OtlpGrpc, OtlpHttp
from otel_kprofiler.config.section import Exporter

EXPORTERS: Final[dict[str, type[Exporter]]] = {
    "otlp_grpc": OtlpGrpc,
    "otlp_http": OtlpHttp,
    "file": File,
    "debug": Debug,
}
"""Schemas by exporter type, the first part of an id (``type`` or ``type/name``)."""
