"""Exporters for encoded profiles (gRPC, HTTP, files, standard output), and their sending queues.

h2 and requests are imported only when an exporter first needs them.
"""

from typing import TYPE_CHECKING

from otel_kprofiler.export.base import (
    ExportOutcome,
    ExportResult,
    KindResult,
    Part,
    ProfileExporter,
    is_wholly_lost,
)
from otel_kprofiler.export.client import (
    DEFAULT_MAX_BYTES,
    HEADER_NAME,
    METRICS,
    PROFILES,
    ClientSettings,
    Protocol,
    Signal,
    Tls,
)
from otel_kprofiler.export.debug import DebugExporter, Verbosity
from otel_kprofiler.export.exporter_settings import (
    DebugSettings,
    ExporterSettings,
    FileSettings,
    OtlpSettings,
    QueueSettings,
    SpoolSettings,
    open_client,
)
from otel_kprofiler.export.exports import export_all
from otel_kprofiler.export.file import FileExporter, Rotation
from otel_kprofiler.export.ledger import Ledgers, QueueCounts
from otel_kprofiler.export.otlp_variables import exporter_from_environment, read_settings
from otel_kprofiler.export.queue import DEFAULT_QUEUE_SIZE, ExportQueue
from otel_kprofiler.export.recovery import count_undelivered
from otel_kprofiler.export.retry import Answer, RetryPolicy, Verdict
from otel_kprofiler.export.sender import OtlpSender, advise_plain_text, speaks_no_tls
from otel_kprofiler.export.spool import Spool
from otel_kprofiler.late import late_names

if TYPE_CHECKING:
    from otel_kprofiler.export.grpc import OtlpGrpcExporter
    from otel_kprofiler.export.http import OtlpHttpExporter

__all__ = [
    "DEFAULT_MAX_BYTES",
    "DEFAULT_QUEUE_SIZE",
    "HEADER_NAME",
    "METRICS",
    "PROFILES",
    "Answer",
    "ClientSettings",
    "DebugExporter",
    "DebugSettings",
    "ExportOutcome",
    "ExportQueue",
    "ExportResult",
    "ExporterSettings",
    "FileExporter",
    "FileSettings",
    "KindResult",
    "Ledgers",
    "OtlpGrpcExporter",
    "OtlpHttpExporter",
    "OtlpSender",
    "OtlpSettings",
    "Part",
    "ProfileExporter",
    "Protocol",
    "QueueCounts",
    "QueueSettings",
    "RetryPolicy",
    "Rotation",
    "Signal",
    "Spool",
    "SpoolSettings",
    "Tls",
    "Verbosity",
    "Verdict",
    "advise_plain_text",
    "count_undelivered",
    "export_all",
    "exporter_from_environment",
    "is_wholly_lost",
    "open_client",
    "read_settings",
    "speaks_no_tls",
]

_LATE = {
    "grpc": "OtlpGrpcExporter",
    "http": "OtlpHttpExporter",
}

__getattr__ = late_names(__name__, _LATE)
