"""What the agent takes of its configuration: values for the parts that do the work.

The process that checks the configuration makes them, so that the agent loads none of the libraries
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from otel_kprofiler.agent.limits import Limits
from otel_kprofiler.export import ExporterSettings
from otel_kprofiler.pipeline import DRAIN_INTERVAL_S, FIRST_WINDOW_NS, WindowSchedule
from otel_kprofiler.sampling import MAX_RING_BYTES, SamplerConfig

if TYPE_CHECKING:
    from otel_kprofiler.config import Config, Receiver
    from otel_kprofiler.model import AttributeValue


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """One configuration of the agent.

    Attributes:
        sampler: what is sampled.
        loader: library that loads the BPF program.
        schedule: the length of windows.
        resource: attributes of every Resource.
        exporters: those of the pipeline, by id and in its order.
        must_sample: end with an error if sampling cannot start.
        sampling_percent: chance that the host samples during one ``sampling_interval_s``.
        sampling_interval_s: how often that is drawn.
        monitor_interval_s: how often the agent measures itself and sends its metrics.
        clock_sync_interval_s: how often the offset of the clocks is measured; 0: at start only.
        limits: what the agent may use.
        drop_all: give up every capability once it samples.
        health_endpoint: where to listen for probes; empty: nowhere.
        shutdown_timeout_s: longest time that stopping may take.
        sends_metrics: whether it sends metrics about itself.
        log_level: least important message that is logged.
        log_encoding: ``auto``, ``console`` or ``json``.
    """

    sampler: SamplerConfig
    loader: str
    schedule: WindowSchedule
    resource: Mapping[str, AttributeValue]
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
    log_level: str
    log_encoding: str


FIXED_AT_START: Final[Mapping[str, Callable[[AgentConfig], object]]] = {
    "loader": lambda config: config.loader,
    "map_scale_factor": lambda config: config.sampler.map_scale_factor,
    "max_frames": lambda config: config.sampler.max_frames,
    "bpf_verifier_log_level": lambda config: config.sampler.verifier_log_level,
    "no_kernel_version_check": lambda config: config.sampler.check_kernel,
}
"""Keys of the receiver that are used when the program is loaded, and not again."""

_RING_SHARE: Final = 16
"""A full ring takes about six times its size until its samples are in windows."""
_MAX_WINDOW_SAMPLES: Final = 32_768
"""About as many as 64 busy CPUs take in 5 s at 99 Hz."""
_WINDOW_SHARE: Final = 8
_SAMPLE_BYTES: Final = 1024
"""What a sample takes in a window if no other is like it."""


def agent_config(config: Config) -> AgentConfig:
    """The agent's values out of a checked configuration."""
    receiver, service = config.receiver, config.service
    logs = service.telemetry.logs
    limits = Limits(
        service.limits.max_cpu_percent / 100, service.limits.max_rss_megabytes * 1024 * 1024
    )
    return AgentConfig(
        sampler=_sampler_config(receiver, limits),
        loader=receiver.loader,
        schedule=_window_schedule(receiver, limits),
        resource={
            name: tuple(value) if isinstance(value, list) else value
            for name, value in receiver.resource.items()
        },
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
        log_level="debug" if receiver.verbose_mode else logs.level,
        log_encoding=logs.encoding,
    )


def _sampler_config(receiver: Receiver, limits: Limits) -> SamplerConfig:
    rss_bytes = limits.rss_bytes
    return SamplerConfig(
        samples_per_second=receiver.samples_per_second,
        stacks=receiver.stacks,
        pin_cpu_ids=receiver.cpus,
        max_frames=receiver.max_frames,
        target_pids=tuple(receiver.target_pids),
        send_idle_frames=receiver.send_idle_frames,
        min_process_age_ns=int(receiver.filter_min_process_age),
        map_scale_factor=receiver.map_scale_factor,
        max_ring_bytes=rss_bytes // _RING_SHARE if rss_bytes else MAX_RING_BYTES,
        drain_interval_s=DRAIN_INTERVAL_S,
        check_kernel=not receiver.no_kernel_version_check,
        verifier_log_level=receiver.bpf_verifier_log_level,
    )


def _window_schedule(receiver: Receiver, limits: Limits) -> WindowSchedule:
    fitting = limits.rss_bytes // _WINDOW_SHARE // _SAMPLE_BYTES
    return WindowSchedule(
        int(receiver.reporter_interval),
        receiver.reporter_jitter,
        FIRST_WINDOW_NS,
        min(_MAX_WINDOW_SAMPLES, fitting) if fitting else _MAX_WINDOW_SAMPLES,
    )


def find_fixed(old: AgentConfig, new: AgentConfig) -> list[str]:
    """Keys whose change has no effect before the agent is started again."""
    return [name for name, read in FIXED_AT_START.items() if read(old) != read(new)]
