"""Publishes the current span of each thread, for any profiler outside this process.

Publishing requires neither sampling nor privileges::

    from otel_kprofiler import thread_context

    thread_context.start()

The format is OpenTelemetry's thread context (OTEP 4947).
"""

from otel_kprofiler.sdk import start_thread_contexts as start
from otel_kprofiler.sdk import stop_thread_contexts as stop

__all__ = ["start", "stop"]
