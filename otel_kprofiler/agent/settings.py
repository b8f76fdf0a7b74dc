"""From the receiver's configuration to the settings of the parts that do the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from otel_kprofiler.pipeline import DRAIN_INTERVAL_S, FIRST_WINDOW_NS, WindowSchedule
from otel_kprofiler.sampling import SamplerConfig

if TYPE_CHECKING:
    from otel_kprofiler.config import Receiver
    from otel_kprofiler.model import AttributeValue

FIXED_AT_START: Final = (
    "loader",
    "map_scale_factor",
    "max_frames",
    "bpf_verifier_log_level",
    "no_kernel_version_check",
)
"""Keys of the receiver that are used when the program is loaded, and not again."""


def sampler_config(receiver: Receiver) -> SamplerConfig:
    """The sampler's settings out of the configuration."""
    return SamplerConfig(
        samples_per_second=receiver.samples_per_second,
        stacks=receiver.stacks,
        pin_cpu_ids=receiver.cpus,
        max_frames=receiver.max_frames,
        target_pids=tuple(receiver.target_pids),
        send_idle_frames=receiver.send_idle_frames,
        min_process_age_ns=int(receiver.filter_min_process_age),
        map_scale_factor=receiver.map_scale_factor,
        drain_interval_s=DRAIN_INTERVAL_S,
        check_kernel=not receiver.no_kernel_version_check,
        verifier_log_level=receiver.bpf_verifier_log_level,
    )


def window_schedule(receiver: Receiver) -> WindowSchedule:
    """The length of windows out of the configuration."""
    return WindowSchedule(
        int(receiver.reporter_interval), receiver.reporter_jitter, FIRST_WINDOW_NS
    )


def resource_attributes(receiver: Receiver) -> dict[str, AttributeValue]:
    """The configured attributes of every Resource."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in receiver.resource.items()
    }


def find_fixed(old: Receiver, new: Receiver) -> list[str]:
    """Keys whose change has no effect before the agent is started again."""
    return [name for name in FIXED_AT_START if getattr(old, name) != getattr(new, name)]
