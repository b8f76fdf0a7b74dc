"""Embeds the profiler in a service, which then exports profiles along with its other telemetry.

Names are imported lazily, because importing the OpenTelemetry SDK is slow.
"""

from typing import TYPE_CHECKING

from otel_kprofiler.late import late_names

if TYPE_CHECKING:
    from otel_kprofiler.export import (
        ExportOutcome,
        ExportResult,
        FileExporter,
        OtlpGrpcExporter,
        OtlpHttpExporter,
        ProfileExporter,
    )
    from otel_kprofiler.otlp import ProcessContext
    from otel_kprofiler.processes import read_process_context
    from otel_kprofiler.sdk.exporters import ConsoleProfileExporter, InMemoryProfileExporter
    from otel_kprofiler.sdk.kernel_profiler import KernelProfiler
    from otel_kprofiler.sdk.label_sets import labels
    from otel_kprofiler.sdk.local_roots import LocalRootSpanProcessor
    from otel_kprofiler.sdk.process_context import publish_process_context, withdraw_process_context
    from otel_kprofiler.sdk.provider import (
        BatchProfileProcessor,
        ProfileProcessor,
        ProfilerProvider,
        SimpleProfileProcessor,
        get_profiler_provider,
        set_profiler_provider,
    )
    from otel_kprofiler.sdk.thread_contexts import start_thread_contexts, stop_thread_contexts

__all__ = [
    "BatchProfileProcessor",
    "ConsoleProfileExporter",
    "ExportOutcome",
    "ExportResult",
    "FileExporter",
    "InMemoryProfileExporter",
    "KernelProfiler",
    "LocalRootSpanProcessor",
    "OtlpGrpcExporter",
    "OtlpHttpExporter",
    "ProcessContext",
    "ProfileExporter",
    "ProfileProcessor",
    "ProfilerProvider",
    "SimpleProfileProcessor",
    "get_profiler_provider",
    "labels",
    "publish_process_context",
    "read_process_context",
    "set_profiler_provider",
    "start_thread_contexts",
    "stop_thread_contexts",
    "withdraw_process_context",
]

_LATE = {
    ".export": (
        "ExportOutcome ExportResult FileExporter OtlpGrpcExporter OtlpHttpExporter ProfileExporter"
    ),
    ".otlp": "ProcessContext",
    ".processes": "read_process_context",
    "exporters": "ConsoleProfileExporter InMemoryProfileExporter",
    "kernel_profiler": "KernelProfiler",
    "label_sets": "labels",
    "local_roots": "LocalRootSpanProcessor",
    "process_context": "publish_process_context withdraw_process_context",
    "provider": (
        "BatchProfileProcessor ProfileProcessor ProfilerProvider SimpleProfileProcessor "
        "get_profiler_provider set_profiler_provider"
    ),
    "thread_contexts": "start_thread_contexts stop_thread_contexts",
}

__getattr__ = late_names(__name__, _LATE)
