"""Kernel-first continuous profiler for OpenTelemetry.

The API for embedding in a service is imported on first use; see :mod:`otel_kprofiler.sdk`.
"""

from typing import TYPE_CHECKING, Any

from otel_kprofiler.version import __version__

if TYPE_CHECKING:
    from otel_kprofiler.sdk import (
        BatchProfileProcessor,
        ConsoleProfileExporter,
        InMemoryProfileExporter,
        KernelProfiler,
        LocalRootSpanProcessor,
        ProfileExporter,
        ProfilerProvider,
        SimpleProfileProcessor,
        get_profiler_provider,
        labels,
        publish_process_context,
        set_profiler_provider,
    )

__all__ = [
    "BatchProfileProcessor",
    "ConsoleProfileExporter",
    "InMemoryProfileExporter",
    "KernelProfiler",
    "LocalRootSpanProcessor",
    "ProfileExporter",
    "ProfilerProvider",
    "SimpleProfileProcessor",
    "__version__",
    "get_profiler_provider",
    "labels",
    "publish_process_context",
    "set_profiler_provider",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from otel_kprofiler import sdk  # noqa: PLC0415

    return getattr(sdk, name)
