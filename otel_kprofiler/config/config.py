"""Defines the root of the configuration schema."""

from collections.abc import Mapping
from typing import ClassVar

from otel_kprofiler.config import unsupported_keys
from otel_kprofiler.config.receiver import Receiver
from otel_kprofiler.config.section import Exporter, Section
from otel_kprofiler.config.service import Service
from otel_kprofiler.export import ExporterSettings


class Receivers(Section):
    """Sources of profiles."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.RECEIVERS

    kprofiler: Receiver


class Config(Section):
    """A valid agent configuration.

    ``exporters`` holds settings for all exporters, even unused, by id (``type`` or ``type/name``).
    """

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.TOP

    receivers: Receivers
    exporters: dict[str, Exporter]
    service: Service

    @property
    def receiver(self) -> Receiver:
        """Returns the sampler's settings."""
        return self.receivers.kprofiler

    @property
    def running_exporters(self) -> dict[str, ExporterSettings]:
        """Returns the settings of the pipeline's exporters, by id, in the pipeline's order."""
        names = self.service.pipelines.profiles.exporters
        return {name: self.exporters[name].settings() for name in names}
