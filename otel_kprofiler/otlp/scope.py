"""The instrumentation scope, which identifies the producer of profiles."""

from dataclasses import dataclass, field

from otel_kprofiler.model import Attributes
from otel_kprofiler.otlp.conventions import SCHEMA_URL
from otel_kprofiler.version import __version__


@dataclass(frozen=True, slots=True)
class Scope:
    """The producer of the profiles (an OpenTelemetry InstrumentationScope)."""

    name: str = "otel_kprofiler"
    version: str = __version__
    attributes: Attributes = field(default_factory=dict)
    schema_url: str = SCHEMA_URL
