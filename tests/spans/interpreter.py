"""Scenarios in plain Python: threads, contexts, generators and asyncio."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import random
import sys
import threading
import time

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from tests.spans.observe import LATEST_S, records_are_read

TRACER = TracerProvider().get_tracer("spans")
UNSAMPLED = TracerProvider(sampler=ALWAYS_OFF).get_tracer("unsampled")


def repeat(seconds, step):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        step()


def nested_spans(truth, seconds, tracer=TRACER):
    """Runs three threads with nested spans, including unsampled and remote spans."""

    def step():
        with tracer.start_as_current_span("outer") as outer:
            truth.observe(outer)
            with tracer.start_as_current_span("inner") as inner:
                truth.observe(inner)
                with UNSAMPLED.start_as_current_span("unsampled") as unsampled:
                    truth.observe(unsampled)
            remote = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(1))
            with trace.use_span(trace.NonRecordingSpan(remote)) as parent:
                truth.observe(parent)
            truth.observe(outer)
        truth.observe(trace.INVALID_SPAN)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(repeat, [seconds] * 3, [step] * 3))


def short_threads(truth, seconds):
    """Runs threads that exit after one span, so that their ids and thread states are reused."""

    def step():
        def work():
            with TRACER.start_as_current_span("once") as span:
                truth.observe(span)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        truth.observe(trace.INVALID_SPAN)
        for thread in threads:
            thread.join()

    repeat(seconds, step)


def disorder(truth, seconds):
    """Spans that are closed out of order, or never."""

    def step():
        spans = [TRACER.start_span(str(number)) for number in range(4)]
        tokens = [otel_context.attach(trace.set_span_in_context(span)) for span in spans]
        truth.observe(spans[-1])
        otel_context.detach(tokens[1])
        truth.observe(spans[0])
        otel_context.detach(tokens[3])
        truth.observe(spans[2])
        spans[2].end()
        truth.observe(spans[2])

    repeat(seconds, lambda: contextvars.copy_context().run(step))


def entered_contexts(truth, seconds):
    """Calls ``Context.run`` in threads and executors, on contexts with many variables."""
    executor = concurrent.futures.ThreadPoolExecutor(3)
    variables = [contextvars.ContextVar(str(number)) for number in range(100)]
    chance = random.Random(3)

    def step():
        with TRACER.start_as_current_span("outer") as outer:
            for variable in chance.sample(variables, 30):
                variable.set(1)
            copied = [contextvars.copy_context() for _ in range(3)]
            done = [executor.submit(each.run, truth.observe, outer) for each in copied]
            with TRACER.start_as_current_span("inner") as inner:
                contextvars.copy_context().run(truth.observe, inner)
                truth.observe(inner)
            contextvars.Context().run(truth.observe, trace.INVALID_SPAN)
            executor.submit(truth.observe, trace.INVALID_SPAN).result()
            concurrent.futures.wait(done)

    with executor:
        repeat(seconds, lambda: contextvars.copy_context().run(step))


def generators(truth, seconds):
    """Runs generators whose spans stay current in the callers."""

    def items():
        with TRACER.start_as_current_span("generator") as span:
            truth.observe(span)
            yield span
            truth.observe(span)

    def step():
        with TRACER.start_as_current_span("caller") as caller:
            generator = items()
            truth.observe(next(generator))
            next(generator, None)
            truth.observe(caller)

    repeat(seconds, step)


async def async_items(truth):
    with TRACER.start_as_current_span("async generator") as span:
        for _ in range(3):
            truth.observe(span)
            await asyncio.sleep(0)
            yield span


async def steps_of_a_task(truth, parent):
    truth.observe(parent)
    with TRACER.start_as_current_span("task") as span:
        truth.observe(span)
        await asyncio.sleep(0)
        truth.observe(span)
        async for inner in async_items(truth):
            truth.observe(inner)
            await asyncio.sleep(0)
        await asyncio.to_thread(truth.observe, span)
        loop = asyncio.get_running_loop()
        loop.call_soon(truth.observe, span)
        loop.call_later(0.0001, truth.observe, span)
        await loop.run_in_executor(None, truth.observe, trace.INVALID_SPAN)
        await asyncio.sleep(0.0002)
        truth.observe(span)
    truth.observe(parent)


async def cancelled(truth):
    with TRACER.start_as_current_span("cancelled") as span:
        try:
            truth.observe(span)
            await asyncio.sleep(10)
        finally:
            truth.observe(span)


async def tasks_once(truth):
    with TRACER.start_as_current_span("parent") as parent:
        await asyncio.gather(*(steps_of_a_task(truth, parent) for _ in range(5)))
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(steps_of_a_task(truth, parent))
        task = asyncio.create_task(cancelled(truth))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        context = contextvars.copy_context()
        await asyncio.create_task(steps_of_a_task(truth, parent), context=context)
        truth.observe(parent)
    truth.observe(trace.INVALID_SPAN)


async def tasks_until(truth, end):
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12) and isinstance(loop, asyncio.BaseEventLoop):
        loop.set_task_factory(asyncio.eager_task_factory)
    while time.monotonic() < end:
        await tasks_once(truth)


def tasks(truth, seconds):
    """Exercises gather, task groups, cancellation, generators, threads, executors and callbacks."""
    asyncio.run(tasks_until(truth, time.monotonic() + seconds))


def uvloop_tasks(truth, seconds):
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(tasks_until(truth, time.monotonic() + seconds))


def hand_written_context_switches(truth, seconds):
    """Runs greenlets, each in a separate context and span."""
    import greenlet

    def work():
        with TRACER.start_as_current_span("greenlet") as span:
            for _ in range(20):
                truth.observe(span)
                parent.switch()

    parent = greenlet.getcurrent()

    def step():
        greenlets = [greenlet.greenlet(work) for _ in range(4)]
        while not all(each.dead for each in greenlets):
            for each in greenlets:
                if not each.dead:
                    each.switch()
            truth.observe(trace.INVALID_SPAN)

    repeat(seconds, step)


def make_wrapping_tracer():
    """Returns a tracer that wraps each SDK span in a span of another class."""

    class Wrapper(trace.Span):
        """A span whose layout and ``_context`` attribute differ from those of SDK spans."""

        __slots__ = ("_context", "_inside")

        def __init__(self, inside):
            self._inside = inside
            self._context = otel_context.Context()

        def get_span_context(self):
            return self._inside.get_span_context()

        def end(self, end_time=None):
            self._inside.end(end_time)

        def is_recording(self):
            return self._inside.is_recording()

        def _ignore(self, *_, **__):
            """Ignores an event."""

        set_attribute = set_attributes = add_event = update_name = _ignore
        set_status = record_exception = _ignore

    class Tracer:
        @contextlib.contextmanager
        def start_as_current_span(self, name):
            with trace.use_span(Wrapper(TRACER.start_span(name)), end_on_exit=True) as span:
                yield span

    assert records_are_read.wait(LATEST_S)  # wait until the profiler notices the class
    return Tracer()


def wrapped_spans(truth, seconds):
    nested_spans(truth, seconds, make_wrapping_tracer())


def wrapped_tasks(truth, seconds):
    """Runs asyncio tasks in wrapped spans and SDK spans."""
    wrapping = make_wrapping_tracer()

    async def work(number):
        with wrapping.start_as_current_span("outer") as outer:
            truth.observe(outer)
            await asyncio.sleep(0)
            truth.observe(outer)
            with (TRACER if number % 2 else wrapping).start_as_current_span("inner") as inner:
                await asyncio.sleep(0)
                truth.observe(inner)
                await asyncio.to_thread(truth.observe, inner)
            truth.observe(outer)

    async def until(end):
        while time.monotonic() < end:
            await asyncio.gather(*map(work, range(4)))
            truth.observe(trace.INVALID_SPAN)

    asyncio.run(until(time.monotonic() + seconds))


SCENARIOS = {
    "nested": nested_spans,
    "threads": short_threads,
    "disorder": disorder,
    "contexts": entered_contexts,
    "generators": generators,
    "asyncio": tasks,
    "uvloop": uvloop_tasks,
    "greenlets": hand_written_context_switches,
    "wrapped": wrapped_spans,
    "wrapped asyncio": wrapped_tasks,
}
