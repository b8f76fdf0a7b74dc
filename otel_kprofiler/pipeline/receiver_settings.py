"""Converts the keys under ``receivers: kprofiler:`` to settings, for the agent and for services."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from otel_kprofiler.host import parse_event
from otel_kprofiler.pipeline.schedule import FIRST_WINDOW_NS, WindowSchedule
from otel_kprofiler.processes import Grain
from otel_kprofiler.sampling import Groups, OffCpuConfig, SamplerConfig
from otel_kprofiler.symbols import UserSymbolSettings

if TYPE_CHECKING:
    from otel_kprofiler.config import Receiver
    from otel_kprofiler.model import AttributeValue


def sampler_config(receiver: Receiver) -> SamplerConfig:
    """Returns the sampler's settings."""
    return SamplerConfig(
        samples_per_second=receiver.samples_per_second,
        stacks=receiver.stacks,
        pin_cpu_ids=receiver.cpus,
        max_frames=receiver.max_frames,
        python_frames=receiver.python_frames,
        user_unwinding=receiver.user_unwinding,
        max_unwind_work=receiver.max_unwind_work,
        max_tables_bytes=receiver.max_unwind_table_megabytes << 20,
        max_table_bytes=receiver.max_unwind_file_megabytes << 20,
        target_pids=tuple(receiver.target_pids),
        target_comms=tuple(map(os.fsencode, receiver.target_comms)),
        send_idle_frames=receiver.send_idle_frames,
        min_process_age_ns=int(receiver.filter_min_process_age),
        map_scale_factor=receiver.map_scale_factor,
        check_kernel=not receiver.no_kernel_version_check,
        verifier_log_level=receiver.bpf_verifier_log_level,
        off_cpu=_off_cpu_config(receiver) if receiver.off_cpu.enabled else None,
        events=tuple(parse_event(text, receiver.samples_per_second) for text in receiver.events),
    )


def _off_cpu_config(receiver: Receiver) -> OffCpuConfig:
    settings = receiver.off_cpu
    return OffCpuConfig(
        samples_per_second=settings.samples_per_second_per_cpu,
        min_duration_ns=int(settings.min_duration),
        wakers=settings.wakers,
        causes=settings.causes,
        leaves_out="" if receiver.target_comms else "process",
    )


def user_symbol_settings(receiver: Receiver) -> UserSymbolSettings:
    """Returns the settings for symbolizing user frames."""
    return UserSymbolSettings(
        detail=receiver.user_symbols, max_bytes=receiver.max_user_symbol_megabytes << 20
    )


def window_schedule(receiver: Receiver) -> WindowSchedule:
    """Returns the schedule of a receiver's windows."""
    return WindowSchedule(
        int(receiver.reporter_interval), receiver.reporter_jitter, FIRST_WINDOW_NS
    )


def resource_attributes(receiver: Receiver) -> dict[str, AttributeValue]:
    """Returns the attributes common to all Resources."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in receiver.resource.items()
    }


def resource_grain(receiver: Receiver) -> Grain:
    """Returns the granularity of the reported Resources, such as process or host."""
    return Grain(receiver.resources)


def target_groups(receiver: Receiver) -> Groups:
    """Returns the containers, pods and units to sample; empty for all processes."""
    return Groups(
        tuple(receiver.target_containers),
        tuple(receiver.target_pods),
        tuple(receiver.target_units),
    )


def service_sources(receiver: Receiver) -> tuple[str, ...]:
    """Returns the name sources for services that do not publish a name."""
    return tuple(receiver.service_name.sources)
