"""Windows of samples and the Resources they belong to."""

from otel_kprofiler.profiles.gate import EventTimeGate
from otel_kprofiler.profiles.resources import SCHEMA_URL, ProcessResources, read_host_attributes
from otel_kprofiler.profiles.windows import WindowBuilder, WindowSchedule

__all__ = [
    "SCHEMA_URL",
    "EventTimeGate",
    "ProcessResources",
    "WindowBuilder",
    "WindowSchedule",
    "read_host_attributes",
]
