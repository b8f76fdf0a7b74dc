"""A service with threads, tasks and executors that publishes its spans and logs their times.

``python -m tests.published_spans FILE`` writes the log and exits when its input ends.
"""

import asyncio
import concurrent.futures
import json
import os
import sys
import threading
import time
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from otel_kprofiler import labels, thread_context

provider = TracerProvider()
trace.set_tracer_provider(provider)
tracer = provider.get_tracer("published")
notes = {}
ended = threading.Event()


def note():
    """Does some work in the current span, and records the start and end of the work."""
    span = trace.get_current_span().get_span_context()
    of_thread = notes.setdefault(threading.get_native_id(), [])
    start = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    for _ in range(40):
        os.stat("/proc/self")
        sum(range(50))
    end = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    link = f"{span.trace_id:032x}{span.span_id:016x}" if span.is_valid else None
    of_thread.append((start, end, link))


def spans():
    note()
    with labels(endpoint="GET /"), tracer.start_as_current_span("outer"):
        note()
        with tracer.start_as_current_span("inner"):
            note()
        note()
    note()


async def task():
    while not ended.is_set():
        note()
        with labels(endpoint="GET /"), tracer.start_as_current_span("task"):
            note()
            await asyncio.sleep(0)
            note()
            await asyncio.to_thread(note)
            with tracer.start_as_current_span("inner"):
                note()
                await asyncio.sleep(0.001)
                note()
        await asyncio.sleep(0)


async def tasks():
    await asyncio.gather(*(task() for _ in range(8)))


def work():
    while not ended.is_set():
        spans()


def main():
    Path("/proc/self/comm").write_text("published")  # threads inherit this name
    thread_context.start({"service.name": "published"})
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        works = [pool.submit(work) for _ in range(3)]
        works.append(pool.submit(asyncio.run, tasks()))
        sys.stdin.read()
        ended.set()
        for done in works:
            done.result()
    Path(sys.argv[1]).write_text(json.dumps(notes))


main()
