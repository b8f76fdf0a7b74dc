"""Measures the cost of context changes before and after this process starts publishing spans.

``python -m benchmarks.span_changes`` prints a JSON object that maps each kind of change to its cost
in nanoseconds.
"""

from __future__ import annotations

import contextvars
import json
import statistics
import time
from collections.abc import Callable
from typing import Final

import greenlet
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from otel_kprofiler import labels, thread_context

CHANGES: Final = 20_000
ROUNDS: Final = 15
WITH_LABELS: Final = "attach and detach, with labels"


def _measure() -> dict[str, float]:
    """Returns the nanoseconds per span change. Half of the changes enter a span.

    The value for ``Context.run`` covers a complete call, which enters and exits a context.
    """
    inside = trace.set_span_in_context(trace.get_tracer("x").start_span("GET /orders"))
    entered = contextvars.copy_context()
    entered.run(otel_context.attach, inside)

    def attach() -> None:
        for _ in range(CHANGES // 2):
            otel_context.detach(otel_context.attach(inside))

    def run() -> None:
        for _ in range(CHANGES // 2):
            entered.run(int)

    switch = _enter_greenlet(inside).switch

    def switches() -> None:
        for _ in range(CHANGES // 2):
            switch()

    costs = {
        "attach and detach": _time(attach),
        "Context.run": 2 * _time(run),
        "switch of greenlets": _time(switches),
    }
    with labels({f"label{number}": "a value of a label" for number in range(4)}):
        inside = trace.set_span_in_context(trace.get_current_span(inside))
        return {**costs, WITH_LABELS: _time(attach)}


def _enter_greenlet(inside: otel_context.Context) -> greenlet.greenlet:
    """Returns a greenlet that runs inside a span and immediately switches back to its caller."""
    outside = greenlet.getcurrent()

    def switch_back() -> None:
        while True:
            outside.switch()

    other = greenlet.greenlet(switch_back)
    other.gr_context = contextvars.copy_context()
    other.gr_context.run(otel_context.attach, inside)
    other.switch()
    return other


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
