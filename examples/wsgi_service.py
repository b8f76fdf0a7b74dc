"""A WSGI service that sends traces, metrics and kernel profiles under one Resource.

Run the service from this directory. Each worker is profiled::

    OTEL_SERVICE_NAME=files OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 \
    OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf OTEL_KPROFILER_SAMPLES_PER_SECOND=99 \
    gunicorn --workers 2 wsgi_service:app
"""

import os
import tempfile
from collections.abc import Callable, Iterable

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from otel_kprofiler import KernelProfiler

tracer_provider = TracerProvider()
tracer_provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(tracer_provider)
metrics.set_meter_provider(
    MeterProvider(
        [PeriodicExportingMetricReader(OTLPMetricExporter(), export_interval_millis=1000)],
        resource=tracer_provider.resource,
    )
)

# Profile this process, with the same Resource and endpoint as for its other signals.
KernelProfiler.from_env().start()

tracer = trace.get_tracer("wsgi_service")
requests = metrics.get_meter("wsgi_service").create_counter("requests", unit="{request}")


def app(_environ: object, start_response: Callable[..., object]) -> Iterable[bytes]:
    """Writes and reads a file, in two child spans of the request's span."""
    with tracer.start_as_current_span("request"):
        requests.add(1)
        with tempfile.TemporaryFile() as file:
            with tracer.start_as_current_span("write"):
                for _ in range(64):
                    file.write(os.urandom(16384))
                file.flush()
            with tracer.start_as_current_span("read"):
                file.seek(0)
                total = sum(len(chunk) for chunk in iter(lambda: file.read(16384), b""))
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{os.getpid()} {total}\n".encode()]
