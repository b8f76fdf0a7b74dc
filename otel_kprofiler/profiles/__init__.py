"""Windows of samples and the Resources they belong to."""

from otel_kprofiler.profiles.contexts import (
    CONTEXT_HEADER,
    CONTEXT_SIGNATURE,
    CONTEXT_VERSION,
    ProcessContexts,
    read_process_context,
)
from otel_kprofiler.profiles.gate import EventTimeGate
from otel_kprofiler.profiles.resources import SCHEMA_URL, ProcessResources, read_host_attributes
from otel_kprofiler.profiles.windows import FIRST_WINDOW_NS, WindowBuilder, WindowSchedule

__all__ = [
    "CONTEXT_HEADER",
    "CONTEXT_SIGNATURE",
    "CONTEXT_VERSION",
    "FIRST_WINDOW_NS",
    "SCHEMA_URL",
    "EventTimeGate",
    "ProcessContexts",
    "ProcessResources",
    "WindowBuilder",
    "WindowSchedule",
    "read_host_attributes",
    "read_process_context",
]
