"""The schema for ``exporters: debug:``, with keys from the Collector's debug exporter."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from otel_kprofiler.config import unsupported_keys
from otel_kprofiler.config.section import Exporter
from otel_kprofiler.export import DebugSettings, Verbosity


class Debug(Exporter):
    """Prints a summary of each batch to standard output."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.DEBUG

    verbosity: Literal["basic", "normal", "detailed"] = Field(
        default="basic",
        description="Contents of the line printed for each batch. basic: the number of "
        "profiles, samples and bytes. normal: also the interval and the bytes per sample. "
        "detailed: also the number of samples in each profile.",
    )

    def settings(self) -> DebugSettings:
        """Returns the settings for opening the exporter."""
        return DebugSettings(verbosity=Verbosity(self.verbosity))
