"""Assigns samples to processes, and finds the processes' Resources and published contexts."""

from otel_kprofiler.processes.contexts import ProcessContexts
from otel_kprofiler.processes.grain import Grain, merge_resources
from otel_kprofiler.processes.published_context import (
    CONTEXT_HEADER,
    CONTEXT_SIGNATURE,
    CONTEXT_VERSION,
    read_process_context,
)
from otel_kprofiler.processes.resources import (
    SERVICE_SOURCES,
    ProcessResources,
    read_host_attributes,
)
from otel_kprofiler.processes.self_profiled import (
    SELF_PROFILED,
    TARGET,
    is_self_profiled,
    leave_out_self_profiled,
)
from otel_kprofiler.processes.thread_contexts import (
    KEY_MAP,
    SCHEMA,
    SearchTooLongError,
    find_place,
)
