"""Converts the configuration to agent settings, and defines fixed limits such as window sizes.

The child process that checks the configuration also converts it, so that the agent does not load
the schema's libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from otel_kprofiler.agent.limits import Limits
from otel_kprofiler.export import ExporterSettings
from otel_kprofiler.pipeline import (
    DRAIN_INTERVAL_S,
    PipelineOptions,
    WindowSchedule,
    resource_attributes,
    resource_grain,
    sampler_config,
    service_sources,
    target_groups,
    user_symbol_settings,
    window_schedule,
)
from otel_kprofiler.processes import Grain
from otel_kprofiler.sampling import MAX_RING_BYTES, Groups, SamplerConfig
from otel_kprofiler.symbols import UserSymbolSettings

if TYPE_CHECKING:
    from otel_kprofiler.config import Config, Receiver
    from otel_kprofiler.model import AttributeValue


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Settings for the agent. The configuration's schema describes the settings not listed here.

    Attributes:
        service_sources: sources of service names for processes that do not publish a name.
        exporters: settings of the pipeline's exporters, by id, in the pipeline's order.
        must_sample: whether to exit with an error if sampling cannot start.
        sampling_percent: probability, in percent, that the host samples during an interval.
        sampling_interval_s: length of each sampling interval; see ``sampling_percent``.
        clock_sync_interval_s: interval at which the clock offset is measured; 0 measures it only at
            startup.
        health_endpoint: address that the health server listens on; empty for no server.
    """

    sampler: SamplerConfig
    groups: Groups
    user_symbols: UserSymbolSettings
    loader: str
    schedule: WindowSchedule
    resource: Mapping[str, AttributeValue]
    grain: Grain
    leaves_out_self_profiled: bool
    service_sources: tuple[str, ...]
    exporters: Mapping[str, ExporterSettings]
    must_sample: bool
    sampling_percent: int
    sampling_interval_s: float
    monitor_interval_s: float
    clock_sync_interval_s: float
    limits: Limits
    drop_all: bool
    health_endpoint: str
    shutdown_timeout_s: float
    sends_metrics: bool
    metrics_interval_s: float
    log_level: str
    log_encoding: str

    def apply_to(self, options: PipelineOptions) -> PipelineOptions:
        """Returns the pipeline options with the agent's settings applied."""
        return replace(
            options,
            grain=self.grain,
            leaves_out_self_profiled=self.leaves_out_self_profiled,
            limits_processes=True,
        )


FIXED_AT_START: Final[Mapping[str, Callable[[AgentConfig], object]]] = {
    "loader": lambda config: config.loader,
    "map_scale_factor": lambda config: config.sampler.map_scale_factor,
    "python_frames": lambda config: config.sampler.python_frames,
    "off_cpu": lambda config: config.sampler.off_cpu,
    "events": lambda config: config.sampler.events,
    "max_frames": lambda config: config.sampler.max_frames,
    "user_unwinding": lambda config: config.sampler.user_unwinding,
    "max_unwind_work": lambda config: config.sampler.max_unwind_work,
    "max_unwind_table_megabytes": lambda config: config.sampler.max_tables_bytes,
    "max_unwind_file_megabytes": lambda config: config.sampler.max_table_bytes,
    "user_symbols": lambda config: config.user_symbols.detail,
    "max_user_symbol_megabytes": lambda config: config.user_symbols.max_bytes,
    "bpf_verifier_log_level": lambda config: config.sampler.verifier_log_level,
    "no_kernel_version_check": lambda config: config.sampler.check_kernel,
}
"""The receiver's configuration keys that take effect only when the BPF program is loaded."""

_RING_SHARE: Final = 16
"""Minimum ratio of memory limit to ring buffer size. Samples grow about sixfold when decoded."""
_MAX_WINDOW_SAMPLES: Final = 32_768
"""Maximum number of samples in a window: about 5 s of 64 busy CPUs at 99 Hz."""
_WINDOW_SHARE: Final = 8
_SAMPLE_BYTES: Final = 1024
"""Memory, in bytes, that a window uses for each sample with a unique stack."""


def agent_config(config: Config) -> AgentConfig:
    """Convert a validated configuration to the agent's settings."""
    receiver, service = config.receiver, config.service
    logs = service.telemetry.logs
    limits = Limits(
        service.limits.max_cpu_percent / 100, service.limits.max_rss_megabytes * 1024 * 1024
    )
    return AgentConfig(
        sampler=_sampler_config(receiver, limits, drop_all=service.privileges.drop_all),
        groups=target_groups(receiver),
        user_symbols=user_symbol_settings(receiver),
        loader=receiver.loader,
        schedule=_window_schedule(receiver, limits),
        resource=resource_attributes(receiver),
        grain=resource_grain(receiver),
        leaves_out_self_profiled=receiver.self_profiled == "leave_out",
        service_sources=service_sources(receiver),
        exporters=config.running_exporters,
        must_sample=receiver.error_mode == "propagate",
        sampling_percent=receiver.probabilistic_threshold,
        sampling_interval_s=receiver.probabilistic_interval.seconds,
        monitor_interval_s=receiver.monitor_interval.seconds,
        clock_sync_interval_s=receiver.clock_sync_interval.seconds,
        limits=limits,
        drop_all=service.privileges.drop_all,
        health_endpoint=service.health.endpoint,
        shutdown_timeout_s=service.shutdown_timeout.seconds,
        sends_metrics=service.telemetry.metrics.level != "none",
        metrics_interval_s=service.telemetry.metrics.interval.seconds,
        log_level="debug" if receiver.verbose_mode else logs.level,
        log_encoding=logs.encoding,
    )


def _sampler_config(receiver: Receiver, limits: Limits, *, drop_all: bool) -> SamplerConfig:
    rss_bytes = limits.rss_bytes
    return replace(
        sampler_config(receiver),
        # Without capabilities, other users' files cannot be opened, nor unwind tables loaded.
        user_unwinding="frame_pointers" if drop_all else receiver.user_unwinding,
        max_ring_bytes=rss_bytes // _RING_SHARE if rss_bytes else MAX_RING_BYTES,
        drain_interval_s=DRAIN_INTERVAL_S,
    )


def _window_schedule(receiver: Receiver, limits: Limits) -> WindowSchedule:
    fitting = limits.rss_bytes // _WINDOW_SHARE // _SAMPLE_BYTES
    most = min(_MAX_WINDOW_SAMPLES, fitting) if fitting else _MAX_WINDOW_SAMPLES
    return replace(window_schedule(receiver), max_samples=most)


def find_fixed(old: AgentConfig, new: AgentConfig) -> list[str]:
    """Returns the changed configuration keys that take effect only after a restart."""
    return [name for name, read in FIXED_AT_START.items() if read(old) != read(new)]
