"""A WSGI service, for gunicorn with threads, that logs each of its steps."""

import os

from step_log import step
from tracing import tracer


def work():
    for _ in range(20):
        os.listdir("/proc/self/task")
    sum(range(20_000))


def app(environ, start_response):
    with tracer.start_as_current_span("request") as request:
        step(request)
        work()
        for name in ("first", "second"):
            step(None)
            with tracer.start_as_current_span(name) as span:
                step(span)
                work()
                step(None)
            step(request)
            work()
        step(None)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"ok\n"]
