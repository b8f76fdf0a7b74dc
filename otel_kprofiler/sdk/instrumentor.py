"""The entry point ``kprofiler`` of ``opentelemetry_instrumentor``.

Starts the profiler under ``opentelemetry-instrument``, and under declarative configuration
(``instrumentation/development: {python: {kprofiler: {…}}}``) with the keys of the agent's
``receivers: kprofiler:`` and those of :class:`otel_kprofiler.sdk.settings.Settings`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from otel_kprofiler.errors import ConfigError
from otel_kprofiler.sdk.kernel_profiler import KernelProfiler
from otel_kprofiler.sdk.settings import make_settings

_log = logging.getLogger(__name__)


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
        """Start; with options, those count instead of ``OTEL_KPROFILER_*``. Never raises."""
        try:
            if options:
                settings = make_settings(options, source="instrumentation/development.python")
                self._profiler = KernelProfiler.from_settings(settings)
            else:
                self._profiler = KernelProfiler.from_env()
        except ConfigError as error:
            _log.warning("no kernel profiles: %s (fix: %s)", error, error.hint)
            return
        self._profiler.start("warn")

    def _uninstrument(self, **_: Any) -> None:
        """Stop, and export what is left."""
        if self._profiler is not None:
            self._profiler.stop()
