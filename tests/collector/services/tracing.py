"""Tracing for services under test. Spans must not be lost before export."""

import os

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

if not isinstance(trace.get_tracer_provider(), TracerProvider):
    provider = TracerProvider()
    processor = BatchSpanProcessor(
        OTLPSpanExporter(), max_queue_size=1 << 20, schedule_delay_millis=500
    )
    provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)

tracer = trace.get_tracer("service")

if os.environ.get("START_PROFILER") == "1":
    from otel_kprofiler import KernelProfiler

    KernelProfiler.from_env().start()
