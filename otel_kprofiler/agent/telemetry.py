"""Exports the agent's own metrics, and loads the OpenTelemetry SDK only if needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_kprofiler.export import ExportResult, OtlpSettings
from otel_kprofiler.model import Account

CLOSE_TIMEOUT_S: Final = 2.0
"""Maximum time, in seconds, that the last export may delay a shutdown."""

if TYPE_CHECKING:
    from otel_kprofiler.agent.agent_settings import AgentConfig
    from otel_kprofiler.agent.cpu_time import CpuTime
    from otel_kprofiler.agent.metrics import SelfMetrics


class Readings(NamedTuple):
    """Functions that return metric values, called by an OpenTelemetry SDK thread.

    Attributes:
        account: returns the numbers of samples taken, exported and lost.
        generation: returns the number of kernel symbol changes.
        lost_symbols: returns the number of lost symbol records by cause.
        cpu_time: returns the agent's CPU time so far.
        coarse: returns, for each kind of detail, the number of samples that lack it.
    """

    account: Callable[[], Account]
    generation: Callable[[], int]
    lost_symbols: Callable[[], Mapping[str, int]]
    cpu_time: Callable[[], CpuTime]
    coarse: Callable[[], Mapping[str, int]]


class Telemetry:
    """The agent's metrics about itself, as currently configured."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._metrics: SelfMetrics | None = None
        self._settings: Any = None

    def on_export(self, name: str, result: ExportResult, seconds: float) -> None:
        """Record the duration and the outcome of an export. Thread-safe."""
        if self._metrics:
            self._metrics.record_export(name, result, seconds)

    def configure(self, config: AgentConfig) -> None:
        """Send metrics to a configuration's OTLP receivers, if metrics are enabled.

        Raises ``ExportError``, and changes nothing, if a TLS file is unusable.
        """
        receivers = {
            name: settings.client
            for name, settings in config.exporters.items()
            if config.sends_metrics and isinstance(settings, OtlpSettings)
        }
        settings = receivers, config.metrics_interval_s, config.resource
        if settings == self._settings or not (receivers or self._metrics):
            return
        if self._metrics is None:
            from otel_kprofiler.agent.metrics import SelfMetrics  # noqa: PLC0415 - 2 MB

            self._metrics = SelfMetrics(self._readings)
        self._metrics.configure(receivers, config.resource, interval_s=config.metrics_interval_s)
        self._settings = settings

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send the final metrics and stop, giving up after ``timeout_s``."""
        metrics, self._metrics, self._settings = self._metrics, None, None
        if metrics:
            metrics.close(min(timeout_s, CLOSE_TIMEOUT_S))
