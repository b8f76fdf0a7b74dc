"""The whole configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from otel_kprofiler.config import unsupported_keys
from otel_kprofiler.config.receiver import Receiver
from otel_kprofiler.config.section import Exporter, Section
from otel_kprofiler.config.service import Service
from otel_kprofiler.export import ExporterSettings


class Receivers(Section):
    """What makes profiles."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.RECEIVERS

    kprofiler: Receiver


class Config(Section):
    """Configuration of the agent, valid as a whole.

    Attributes:
        receivers: what makes profiles.
        exporters: settings by id (``type`` or ``type/name``), including ones that do not run.
        service: what runs.
    """

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.TOP

    receivers: Receivers
    exporters: dict[str, Exporter]
    service: Service

    @property
    def receiver(self) -> Receiver:
        """Settings of the sampler."""
        return self.receivers.kprofiler

    @property
    def running_exporters(self) -> dict[str, ExporterSettings]:
        """What the exporters of the pipeline are opened with, by id and in its order."""
        names = self.service.pipelines.profiles.exporters
        return {name: self.exporters[name].settings() for name in names}
