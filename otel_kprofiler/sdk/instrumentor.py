"""The entry point ``kprofiler`` of ``opentelemetry_instrumentor``.

Starts the profiler under ``opentelemetry-instrument``, and under declarative configuration
(``instrumentation/development: {python: {kprofiler: {…}}}``) with the keys of the agent's
``receivers: kprofiler:`` and those of :class:`otel_kprofiler.sdk.settings.Settings`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from otel_kprofiler.sdk.declarative import find_applied_configuration, find_otlp_settings
from otel_kprofiler.sdk.kernel_profiler import KernelProfiler


class KernelProfilerInstrumentor(BaseInstrumentor):  # type: ignore[misc] # it is untyped
    """Starts and stops the profiler of this process.

    Options of the declarative configuration are checked by our own schema, which names every
    mistake at once; so there is no dataclass ``configuration`` for the SDK to check by.
    """

    _profiler: KernelProfiler | None = None

    def instrumentation_dependencies(self) -> Collection[str]:
        """Nothing: what is instrumented is the process."""
        return []

    def _instrument(self, **options: Any) -> None:
        """Start; in declarative configuration the options count, not ``OTEL_KPROFILER_*``."""
        configuration = find_applied_configuration()
        if options or configuration is not None:
            otlp = find_otlp_settings(configuration) if configuration is not None else None
            self._profiler = KernelProfiler.from_options(options, otlp=otlp)
        else:
            self._profiler = KernelProfiler.from_env()
        self._profiler.start("warn")

    def _uninstrument(self, **_: Any) -> None:
        """Stop, and export what is left."""
        if self._profiler is not None:
            self._profiler.stop()
