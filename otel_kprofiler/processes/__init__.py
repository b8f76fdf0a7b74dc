"""Attributes samples to processes: identity, Resources, their grain, published contexts."""

from otel_kprofiler.processes.contexts import (
    CONTEXT_HEADER,
    CONTEXT_SIGNATURE,
    CONTEXT_VERSION,
    ProcessContexts,
    read_process_context,
)
from otel_kprofiler.processes.grain import Grain, merge_resources
from otel_kprofiler.processes.resources import SCHEMA_URL, ProcessResources, read_host_attributes

__all__ = [
    "CONTEXT_HEADER",
    "CONTEXT_SIGNATURE",
    "CONTEXT_VERSION",
    "SCHEMA_URL",
    "Grain",
    "ProcessContexts",
    "ProcessResources",
    "merge_resources",
    "read_host_attributes",
    "read_process_context",
]
