"""A service for gunicorn, which responds with the times that it measured for its span."""

import json
import os
import time

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from otel_kprofiler import thread_context

trace.set_tracer_provider(TracerProvider(resource=Resource({"service.name": "stock"})))
thread_context.start()
tracer = trace.get_tracer("stock")
zero, buffer = os.open("/dev/zero", os.O_RDONLY), bytearray(1 << 20)


def work(seconds, action):
    start = time.thread_time_ns()
    while time.thread_time_ns() < start + seconds * 1e9:
        action()
    return time.thread_time_ns() - start


def app(environ, start_response):
    seconds = int(environ["HTTP_MS"]) / 1e3
    parent = TraceContextTextMapPropagator().extract({"traceparent": environ["HTTP_TRACEPARENT"]})
    with tracer.start_as_current_span("GET /stock/{item}", context=parent) as span:
        start = time.monotonic_ns() - time.thread_time_ns()
        used = [
            work(seconds, lambda: sum(range(10_000))),
            work(seconds, lambda: os.readv(zero, [buffer])),
        ]
        time.sleep(seconds)
        waited = time.monotonic_ns() - time.thread_time_ns() - start
        name = f"{span.get_span_context().span_id:016x}"
    body = json.dumps([{"service": "stock", "span": name, "used": used, "waited": waited}]).encode()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]
