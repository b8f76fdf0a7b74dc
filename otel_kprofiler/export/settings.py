"""Settings of exporters, made from the configuration: each opens its own exporter.

They are plain values, so that the process that checks the configuration can hand them over, and
two of them are equal if they mean the same exporter.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote

from otel_kprofiler.export.debug import DebugExporter, Verbosity
from otel_kprofiler.export.file import FileExporter, Rotation
from otel_kprofiler.export.queue import DEFAULT_QUEUE_SIZE
from otel_kprofiler.export.retry import RetryPolicy
from otel_kprofiler.export.sender import Tls
from otel_kprofiler.export.spool import Spool
from otel_kprofiler.model import AttributeForm, Form

if TYPE_CHECKING:
    from otel_kprofiler.export.base import ProfileExporter


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """Batches that wait on disk.

    Attributes:
        directory: of all exporters; each has its own below it.
        max_bytes: size of an exporter's own directory.
        max_age_s: older batches are dropped; 0 keeps them.
        fsync: whether batches survive a power failure.
    """

    directory: str
    max_bytes: int
    max_age_s: float
    fsync: bool

    def open(self, name: str) -> Spool:
        """The spool of the exporter with this id."""
        return Spool(
            os.path.join(self.directory, quote(name, safe="")),
            max_bytes=self.max_bytes,
            max_age_s=self.max_age_s,
            fsync=self.fsync,
        )


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Batches that wait for an exporter.

    Attributes:
        size: how many may wait in memory.
        spool: where they wait instead; None for in memory.
    """

    size: int = DEFAULT_QUEUE_SIZE
    spool: SpoolSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterSettings(ABC):
    """What every kind of exporter has.

    Attributes:
        queue: what waits for it.
    """

    queue: QueueSettings = QueueSettings()

    @abstractmethod
    def open(self, name: str) -> ProfileExporter:
        """Make the exporter with this id (``type`` or ``type/name``).

        Raises:
            ExportError: a file, a certificate or an address is unusable.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings(ExporterSettings):
    """What the exporters to OTLP receivers have in common; as their arguments of the same names.

    Addresses may hold passwords, and headers do: neither is shown.
    """

    endpoint: str = field(repr=False)
    proxy_url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    compression: str
    timeout_s: float
    retry: RetryPolicy
    tls: Tls
    max_bytes: int
    attributes: AttributeForm


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSettings(ClientSettings):
    """OTLP over gRPC."""

    def open(self, name: str) -> ProfileExporter:
        """Make the exporter; loads gRPC."""
        from otel_kprofiler.export.grpc import OtlpGrpcExporter  # noqa: PLC0415 - 20 MB

        return OtlpGrpcExporter(
            self.endpoint,
            headers=self.headers,
            tls=self.tls,
            compression=self.compression,
            proxy_url=self.proxy_url,
            timeout_s=self.timeout_s,
            retry=self.retry,
            max_bytes=self.max_bytes,
            attributes=self.attributes,
            name=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings(ClientSettings):
    """OTLP over HTTP.

    Attributes:
        form: of the requests.
    """

    form: Form

    def open(self, name: str) -> ProfileExporter:
        """Make the exporter; loads requests."""
        from otel_kprofiler.export.http import OtlpHttpExporter  # noqa: PLC0415 - 9 MB

        return OtlpHttpExporter(
            self.endpoint,
            form=self.form,
            headers=self.headers,
            tls=self.tls,
            compression=self.compression,
            proxy_url=self.proxy_url,
            timeout_s=self.timeout_s,
            retry=self.retry,
            max_bytes=self.max_bytes,
            attributes=self.attributes,
            name=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings(ExporterSettings):
    """OTLP in files; as the arguments of :class:`FileExporter`."""

    path: str
    form: Form
    attributes: AttributeForm
    rotation: Rotation | None

    def open(self, name: str) -> ProfileExporter:
        """Make the exporter; opens the file."""
        return FileExporter(
            self.path,
            form=self.form,
            rotation=self.rotation,
            attributes=self.attributes,
            name=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugSettings(ExporterSettings):
    """Lines on standard output."""

    verbosity: Verbosity

    def open(self, name: str) -> ProfileExporter:
        """Make the exporter."""
        return DebugExporter(verbosity=self.verbosity, name=name)
