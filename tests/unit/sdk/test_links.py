"""Span links: what a thread's slot says, at every instant, in every way that spans change.

The kernel's part is played by :func:`seen`: it reads the slot as the program does.
"""

import asyncio
import concurrent.futures
import contextvars
import ctypes
import os
import threading

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from otel_kprofiler.bpf import SLOT_BYTES, SpanSlot
from otel_kprofiler.sdk.links import SpanLinks
from otel_kprofiler.sdk.thread_slot import find_context_offset

TRACER = TracerProvider().get_tracer("test")


class Slots:
    """Slots without a kernel."""

    def __init__(self, most=64):
        self.most = most
        self.used = {}

    def register(self, tid):
        if tid not in self.used:
            if len(self.used) == self.most:
                return None
            self.used[tid] = SpanSlot(memoryview(bytearray(SLOT_BYTES)).cast("Q"))
        return self.used[tid]

    def release(self, tid):
        return self.used.pop(tid, None) is not None


@pytest.fixture
def slots():
    return Slots()


@pytest.fixture
def links(slots):
    links = SpanLinks(slots)
    links.start()
    yield links
    links.stop()


def seen(slots):
    """The link that a sample of this thread would have now, as (trace id, span id)."""
    slot = slots.used.get(threading.get_native_id())
    if slot is None:
        return None
    span_id, high, low, context_at, context = slot.words
    if not span_id or ctypes.c_uint64.from_address(context_at).value != context:
        return None
    return high << 64 | low, span_id


def ids(span):
    context = span.get_span_context()
    return context.trace_id, context.span_id


def test_the_offset_of_the_current_context_is_found_the_same_each_time():
    assert find_context_offset() == find_context_offset() is not None


def test_nested_spans_and_spans_made_current_by_hand(slots, links):
    assert seen(slots) is None
    with TRACER.start_as_current_span("outer") as outer:
        assert seen(slots) == ids(outer)
        with TRACER.start_as_current_span("inner") as inner:
            assert seen(slots) == ids(inner)
        assert seen(slots) == ids(outer)
        with TRACER.start_as_current_span("other trace", context=otel_context.Context()) as other:
            assert seen(slots) == ids(other)
        assert seen(slots) == ids(outer)
        token = otel_context.attach(trace.set_span_in_context(trace.INVALID_SPAN))
        assert seen(slots) is None
        otel_context.detach(token)
        assert seen(slots) == ids(outer)
    assert seen(slots) is None


def test_a_span_that_is_current_at_the_start_is_seen(slots):
    links = SpanLinks(slots)
    with TRACER.start_as_current_span("before") as span:
        links.start()
        assert seen(slots) == ids(span)
        links.stop()


def test_unsampled_and_remote_spans_give_no_link(slots, links):
    unsampled = TracerProvider(sampler=ALWAYS_OFF).get_tracer("x")
    with unsampled.start_as_current_span("unsampled"):
        assert seen(slots) is None
    remote = SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(1))
    with use_span(NonRecordingSpan(remote)):
        assert seen(slots) is None
        with TRACER.start_as_current_span("served") as span:
            assert seen(slots) == ids(span)
        assert seen(slots) is None


def test_unsampled_spans_give_a_link_by_option(slots):
    links = SpanLinks(slots, unsampled=True)
    links.start()
    unsampled = TracerProvider(sampler=ALWAYS_OFF).get_tracer("x")
    with unsampled.start_as_current_span("unsampled") as span:
        assert seen(slots) == ids(span)
    links.stop()


def test_something_that_is_no_span_is_counted_and_not_felt(slots, links):
    token = otel_context.attach(trace.set_span_in_context("not a span"))
    assert seen(slots) is None
    otel_context.detach(token)
    assert links.failures == 1
    with TRACER.start_as_current_span("fine") as span:
        assert seen(slots) == ids(span)


def test_threads_have_slots_of_their_own_and_give_them_back(slots, links):
    wrong = []

    def work():
        if seen(slots) is not None:
            wrong.append("before")
        with TRACER.start_as_current_span("t") as span:
            barrier.wait()
            if seen(slots) != ids(span):
                wrong.append("in")
            barrier.wait()

    barrier = threading.Barrier(9)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    barrier.wait()
    assert (links.threads, len(slots.used)) == (8, 8)
    barrier.wait()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert (links.threads, slots.used) == (0, {})


def test_threads_beyond_the_slots_have_no_links_and_are_counted():
    slots = Slots(most=0)
    links = SpanLinks(slots)
    links.start()
    with TRACER.start_as_current_span("x"):
        assert seen(slots) is None
    assert (links.threads, links.without_slot) == (0, 1)
    links.stop()


async def nest(slots, depth, wrong):
    """Spans around waits; between any two steps other tasks run."""
    with TRACER.start_as_current_span("n") as span:
        for _ in range(3):
            if seen(slots) != ids(span):
                wrong.append((depth, span))
            await asyncio.sleep(0)
        if depth:
            await nest(slots, depth - 1, wrong)
            if seen(slots) != ids(span):
                wrong.append((depth, span))


def test_each_step_of_a_task_runs_under_its_own_span(slots, links):
    wrong = []

    async def main():
        await asyncio.gather(*(nest(slots, 3, wrong) for _ in range(200)))
        assert seen(slots) is None

    asyncio.run(main())
    assert wrong == []


def test_a_task_made_in_a_span_is_in_it_and_callbacks_are_too(slots, links):
    got = []

    async def child():
        got.append(seen(slots))
        await asyncio.sleep(0)
        got.append(seen(slots))

    async def main():
        loop = asyncio.get_running_loop()
        with TRACER.start_as_current_span("parent") as span:
            loop.call_soon(lambda: got.append(seen(slots)))
            await asyncio.gather(child(), child())
            await asyncio.to_thread(lambda: got.append(seen(slots)))
        return ids(span)

    parent = asyncio.run(main())
    assert got == [parent] * 6


def test_the_loop_itself_is_in_the_span_around_it(slots, links):
    with TRACER.start_as_current_span("around") as span:
        asyncio.run(asyncio.sleep(0))
        assert seen(slots) == ids(span)


def test_an_executor_runs_in_no_span_unless_it_is_given_the_context(slots, links):
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        TRACER.start_as_current_span("submitting") as span,
    ):
        run = contextvars.copy_context().run
        assert pool.submit(seen, slots).result() is None
        assert pool.submit(run, seen, slots).result() == ids(span)
        assert pool.submit(seen, slots).result() is None


def test_who_enters_a_context_without_telling_gets_no_link_rather_than_a_wrong_one(slots, links):
    """As event loops in C and libraries with worker threads of their own do."""
    contexts = [contextvars.copy_context() for _ in range(3)]
    spans = [TRACER.start_span(str(number)) for number in range(3)]

    def begin(span):
        otel_context.attach(trace.set_span_in_context(span))
        return seen(slots)

    assert [c.run(begin, s) for c, s in zip(contexts, spans, strict=True)] == [
        ids(span) for span in spans
    ]
    # The last one that wrote is known, the others are not any more.
    assert [context.run(seen, slots) for context in contexts] == [None, None, ids(spans[2])]
    assert seen(slots) is None


def test_a_context_at_the_address_of_an_ended_one_is_not_taken_for_it(slots, links):
    """An ended task leaves its context; the next one is often made in the same place."""

    def begin():
        with TRACER.start_as_current_span("inside"):
            pass

    with TRACER.start_as_current_span("outside"):
        for _ in range(100):
            ended = contextvars.copy_context()
            ended.run(begin)
            del ended
            fresh = contextvars.Context()
            assert fresh.run(seen, slots) is None


def test_other_event_loops_are_named(slots, links):
    uvloop = pytest.importorskip("uvloop")
    wrong = []

    async def main():
        await asyncio.gather(*(check(number) for number in range(50)))

    async def check(_):
        with TRACER.start_as_current_span("n") as span:
            for _ in range(3):
                wrong.append(seen(slots) not in {None, ids(span)})
                await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert not any(wrong)
    assert links.unhooked_loops == {"uvloop.Loop"}


def test_everything_is_as_before_after_the_stop(slots):
    before = (otel_context._RUNTIME_CONTEXT, asyncio.Handle._run)
    links = SpanLinks(slots)
    links.start()
    assert otel_context._RUNTIME_CONTEXT is not before[0]
    links.stop()
    assert (otel_context._RUNTIME_CONTEXT, asyncio.Handle._run) == before


def test_a_forked_child_writes_nothing(slots, links):
    with TRACER.start_as_current_span("parent") as span:
        words = slots.used[threading.get_native_id()].words
        shared = memoryview(bytearray(SLOT_BYTES)).cast("Q")
        shared[:] = words
        pid = os.fork()
        if not pid:
            with TRACER.start_as_current_span("child"):
                untouched = list(words) == list(shared)
            os._exit(0 if untouched and otel_context._RUNTIME_CONTEXT.__class__ else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert seen(slots) == ids(span)
