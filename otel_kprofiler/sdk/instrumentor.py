"""Implements the ``kprofiler`` entry point in the ``opentelemetry_instrumentor`` group.

The entry point starts the profiler under ``opentelemetry-instrument``, and under declarative
configuration (``instrumentation/development: {python: {kprofiler: {…}}}``). The configuration keys
are the fields of :class:`otel_kprofiler.sdk.schema.Settings`.
"""

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from otel_kprofiler.sdk.declarative import find_applied_configuration, find_otlp_settings
from otel_kprofiler.sdk.kernel_profiler import KernelProfiler


class KernelProfilerInstrumentor(BaseInstrumentor):  # type: ignore[misc] # the base is untyped
    """Starts and stops the profiler of this process.

    There is no ``configuration`` dataclass for the SDK's check of declarative options, because the
    profiler's schema reports all errors at once.
    """

    _profiler: KernelProfiler | None = None

    def instrumentation_dependencies(self) -> Collection[str]:
        """Returns no dependencies, because the process itself is instrumented."""
        return []

    def _instrument(self, **options: Any) -> None:
        """Start the profiler. Declarative configuration overrides ``OTEL_KPROFILER_*``."""
        configuration = find_applied_configuration()
        if options or configuration is not None:
            otlp = find_otlp_settings(configuration) if configuration is not None else None
            self._profiler = KernelProfiler.from_options(options, otlp=otlp)
        else:
            self._profiler = KernelProfiler.from_env()
        self._profiler.start("warn")

    def _uninstrument(self, **_: Any) -> None:
        if self._profiler is not None:
            self._profiler.stop()
