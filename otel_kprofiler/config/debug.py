"""``exporters: debug:``, with the keys of the Collector's exporter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from otel_kprofiler.config import unsupported_keys
from otel_kprofiler.config.section import Exporter
from otel_kprofiler.export import DebugSettings, Verbosity


class Debug(Exporter):
    """Prints to standard output."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.DEBUG

    verbosity: Literal["basic", "normal", "detailed"] = Field(
        default="basic",
        description="basic: one line per batch. normal: one line per sample. detailed: everything.",
    )

    def settings(self) -> DebugSettings:
        """Convert to the exporter's settings."""
        return DebugSettings(verbosity=Verbosity(self.verbosity))
