"""From the receiver's configuration to the settings of the parts that do the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from otel_kprofiler.pipeline import DRAIN_INTERVAL_S, FIRST_WINDOW_NS, WindowSchedule
from otel_kprofiler.sampling import MAX_RING_BYTES, SamplerConfig

if TYPE_CHECKING:
    from otel_kprofiler.config import Config, Receiver
    from otel_kprofiler.model import AttributeValue

FIXED_AT_START: Final = (
    "loader",
    "map_scale_factor",
    "max_frames",
    "bpf_verifier_log_level",
    "no_kernel_version_check",
)
"""Keys of the receiver that are used when the program is loaded, and not again."""

_RING_SHARE: Final = 16
"""A full ring takes about six times its size until its samples are in windows."""
_MAX_WINDOW_SAMPLES: Final = 32_768
"""About as many as 64 busy CPUs take in 5 s at 99 Hz."""
_WINDOW_SHARE: Final = 8
_SAMPLE_BYTES: Final = 1024
"""What a sample takes in a window if no other is like it."""


def sampler_config(config: Config) -> SamplerConfig:
    """The sampler's settings out of the configuration."""
    receiver, rss_bytes = config.receiver, _limit_bytes(config)
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


def window_schedule(config: Config) -> WindowSchedule:
    """The length of windows out of the configuration; a limit of memory holds for them, too."""
    receiver = config.receiver
    fitting = _limit_bytes(config) // _WINDOW_SHARE // _SAMPLE_BYTES
    return WindowSchedule(
        int(receiver.reporter_interval),
        receiver.reporter_jitter,
        FIRST_WINDOW_NS,
        min(_MAX_WINDOW_SAMPLES, fitting) if fitting else _MAX_WINDOW_SAMPLES,
    )


def _limit_bytes(config: Config) -> int:
    return config.service.limits.max_rss_megabytes * 1024 * 1024


def resource_attributes(receiver: Receiver) -> dict[str, AttributeValue]:
    """The configured attributes of every Resource."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in receiver.resource.items()
    }


def find_fixed(old: Receiver, new: Receiver) -> list[str]:
    """Keys whose change has no effect before the agent is started again."""
    return [name for name in FIXED_AT_START if getattr(old, name) != getattr(new, name)]
