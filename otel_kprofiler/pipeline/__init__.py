"""Collects samples, live or from a recording, into windows.

Imports most names on first use, so that reading the configuration loads only ``schedule``.
"""

from typing import TYPE_CHECKING, Final

from otel_kprofiler.late import late_names
from otel_kprofiler.pipeline.schedule import (
    DRAIN_INTERVAL_S,
    FIRST_WINDOW_NS,
    IDLE_S,
    LIVE_SCHEDULE,
    LONGEST_DRAIN_INTERVAL_S,
    WindowSchedule,
)

if TYPE_CHECKING:
    from otel_kprofiler.pipeline.composition import (
        change_attributes,
        open_live,
        open_resources,
        open_symbols,
        replay,
    )
    from otel_kprofiler.pipeline.gate import EventTimeGate
    from otel_kprofiler.pipeline.left_out import OF_OTHERS, describe_left_out, describe_sampling
    from otel_kprofiler.pipeline.options import PipelineOptions
    from otel_kprofiler.pipeline.pipeline import Pipeline, WindowSink
    from otel_kprofiler.pipeline.receiver_settings import (
        resource_attributes,
        resource_grain,
        sampler_config,
        service_sources,
        target_groups,
        user_symbol_settings,
        window_schedule,
    )
    from otel_kprofiler.pipeline.thread_dump import ThreadDumper, compare_dumps
    from otel_kprofiler.pipeline.windows import WindowBuilder, WindowCounts

_LATE: Final = {
    "composition": "change_attributes open_live open_resources open_symbols replay",
    "gate": "EventTimeGate",
    "left_out": "OF_OTHERS describe_left_out describe_sampling",
    "options": "PipelineOptions",
    "pipeline": "Pipeline WindowSink",
    "receiver_settings": (
        "resource_attributes resource_grain sampler_config service_sources target_groups "
        "user_symbol_settings window_schedule"
    ),
    "thread_dump": "ThreadDumper compare_dumps",
    "windows": "WindowBuilder WindowCounts",
}

__getattr__ = late_names(__name__, _LATE)
