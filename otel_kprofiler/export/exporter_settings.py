"""Exporter settings from the configuration, with methods that open the exporters."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from otel_kprofiler.export.client import (
    GRPC_ENDPOINT,
    HTTP_ENDPOINT,
    PROFILES,
    ClientSettings,
    Signal,
)
from otel_kprofiler.export.debug import DebugExporter, Verbosity
from otel_kprofiler.export.file import FileExporter, Rotation
from otel_kprofiler.export.queue import DEFAULT_QUEUE_SIZE
from otel_kprofiler.export.spool import Spool
from otel_kprofiler.model import AttributeForm, Form

if TYPE_CHECKING:
    from otel_kprofiler.export.base import ProfileExporter
    from otel_kprofiler.export.sender import OtlpSender


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """Settings of a :class:`Spool`. Each exporter uses its own subdirectory of ``directory``."""

    directory: str
    max_bytes: int
    max_age_s: float
    fsync: bool

    def find_path(self, name: str) -> str:
        """Returns the spool's directory for the exporter with the id ``name``."""
        return os.path.join(self.directory, quote(name, safe=""))

    def open(self, name: str) -> Spool:
        """Open the spool for the exporter with the id ``name``."""
        return Spool(
            self.find_path(name),
            max_bytes=self.max_bytes,
            max_age_s=self.max_age_s,
            fsync=self.fsync,
        )


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Settings for a sending queue. Without a spool, batches are kept in memory only."""

    size: int = DEFAULT_QUEUE_SIZE
    spool: SpoolSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterSettings(ABC):
    """Settings that all exporters have in common."""

    queue: QueueSettings = QueueSettings()

    @abstractmethod
    def open(self, name: str) -> ProfileExporter:
        """Open the exporter under an id such as ``file/backup``. Raises ``ExportError``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpSettings(ExporterSettings):
    """Settings for sending OTLP over gRPC or HTTP."""

    client: ClientSettings

    def open(self, name: str) -> ProfileExporter:
        """Import the exporter's transport, and open the exporter."""
        return open_client(self.client, name)


def open_client(client: ClientSettings, name: str = "", *, signal: Signal = PROFILES) -> OtlpSender:
    """Import the transport for the client's protocol, and open the exporter.

    If ``name`` is empty, the exporter is named after its type.

    Raises:
        ExportError: the endpoint, a header, the compression or a TLS file is unusable.
    """
    if client.protocol == "grpc":
        from otel_kprofiler.export.grpc import OtlpGrpcExporter  # noqa: PLC0415 - loads h2

        client = replace(client, endpoint=client.endpoint or GRPC_ENDPOINT)
        return OtlpGrpcExporter(client, name=name or "otlp_grpc", signal=signal)
    from otel_kprofiler.export.http import OtlpHttpExporter  # noqa: PLC0415 - 9 MB

    client = replace(client, endpoint=client.endpoint or HTTP_ENDPOINT)
    return OtlpHttpExporter(client, name=name or "otlp_http", signal=signal)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings(ExporterSettings):
    """Settings for writing OTLP to files. The fields are the arguments to :class:`FileExporter`."""

    path: str
    form: Form
    attributes: AttributeForm
    rotation: Rotation | None

    def open(self, name: str) -> ProfileExporter:
        """Open the exporter and its output file."""
        return FileExporter(
            self.path,
            form=self.form,
            rotation=self.rotation,
            attributes=self.attributes,
            name=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugSettings(ExporterSettings):
    """Settings for the debug exporter, which prints summaries to standard output."""

    verbosity: Verbosity

    def open(self, name: str) -> ProfileExporter:
        """Open the exporter."""
        return DebugExporter(verbosity=self.verbosity, name=name)
