"""Measures context changes in this process, before and after its spans are published.

Usage: python -m benchmarks.span_changes; prints a JSON object of nanoseconds by kind of change.
"""

from __future__ import annotations

import contextvars
import json
import statistics
import time
from collections.abc import Callable
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from otel_kprofiler import labels, thread_context

CHANGES: Final = 20_000
ROUNDS: Final = 15
WITH_LABELS: Final = "attach and detach, with labels"


def _measure() -> dict[str, float]:
    """Returns nanoseconds per change; half enter a span, half leave it."""
    inside = trace.set_span_in_context(trace.get_tracer("x").start_span("GET /orders"))
    entered = contextvars.copy_context()
    entered.run(otel_context.attach, inside)

    def attach() -> None:
        for _ in range(CHANGES // 2):
            otel_context.detach(otel_context.attach(inside))

    def run() -> None:
        for _ in range(CHANGES // 2):
            entered.run(int)

    costs = {"attach and detach": _time(attach), "Context.run": _time(run)}
    with labels({f"label{number}": "a value of a label" for number in range(4)}):
        inside = trace.set_span_in_context(trace.get_current_span(inside))
        return {**costs, WITH_LABELS: _time(attach)}


def _time(change: Callable[[], None]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time_ns()
        change()
        times.append((time.thread_time_ns() - start) / CHANGES)
    return statistics.median(times)


if __name__ == "__main__":
    trace.set_tracer_provider(TracerProvider())
    _measure()
    plain = _measure()
    thread_context.start({"service.name": "benchmark"})
    published = _measure()
    print(json.dumps({kind: (plain[kind], published[kind]) for kind in plain}))
