"""The whole configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from otel_kprofiler.config import refused
from otel_kprofiler.config.exporters import Exporter
from otel_kprofiler.config.receiver import Receiver
from otel_kprofiler.config.section import Section
from otel_kprofiler.config.service import Service


class Receivers(Section):
    """What makes profiles."""

    refused: ClassVar[Mapping[str, str]] = refused.RECEIVERS

    kprofiler: Receiver


class Config(Section):
    """Configuration of the agent, valid as a whole.

    Attributes:
        receivers: what makes profiles.
        exporters: settings by id (``type`` or ``type/name``), including ones that do not run.
        service: what runs.
    """

    refused: ClassVar[Mapping[str, str]] = refused.TOP

    receivers: Receivers
    exporters: dict[str, Exporter]
    service: Service

    @property
    def receiver(self) -> Receiver:
        """Settings of the sampler."""
        return self.receivers.kprofiler

    @property
    def running_exporters(self) -> dict[str, Exporter]:
        """The exporters of the pipeline, by id and in its order."""
        return {name: self.exporters[name] for name in self.service.pipelines.profiles.exporters}
