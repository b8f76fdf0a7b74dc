"""The way of a sample: gate, windows, and the one composition for live and replay."""

from otel_kprofiler.pipeline.composition import change_attributes, open_live, open_symbols, replay
from otel_kprofiler.pipeline.gate import EventTimeGate
from otel_kprofiler.pipeline.pipeline import DRAIN_INTERVAL_S, Pipeline, WindowSink
from otel_kprofiler.pipeline.windows import FIRST_WINDOW_NS, WindowBuilder, WindowSchedule

__all__ = [
    "DRAIN_INTERVAL_S",
    "FIRST_WINDOW_NS",
    "EventTimeGate",
    "Pipeline",
    "WindowBuilder",
    "WindowSchedule",
    "WindowSink",
    "change_attributes",
    "open_live",
    "open_symbols",
    "replay",
]
