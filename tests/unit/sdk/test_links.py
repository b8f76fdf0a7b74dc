"""Span links: what threads publish, at every instant and for every kind of span change.

:func:`seen` plays the kernel program: it reads the same memory.
"""

import asyncio
import collections
import concurrent.futures
import contextvars
import ctypes
import os
import queue
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context.contextvars_context import ContextVarsRuntimeContext
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from otel_kprofiler.sdk import links as links_module
from otel_kprofiler.sdk import thread_slot
from otel_kprofiler.sdk.links import SpanLinks
from otel_kprofiler.sdk.other_threads import is_changing_context
from otel_kprofiler.sdk.thread_slot import (
    ThreadSlot,
    find_context_offset,
    find_entered_offset,
    find_owner_offset,
    find_span_layout,
    get_token,
)

pytestmark = pytest.mark.system

TRACER = TracerProvider().get_tracer("test")


class Slots:
    """Slots in user space."""

    def __init__(self, most=64):
        self.most = most
        self.used = {}

    def register(self, tid, said_at, context_at):
        if len(self.used) == self.most and tid not in self.used:
            return False
        self.used[tid] = said_at, context_at
        return True

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


def word(address):
    return ctypes.c_uint64.from_address(address).value


def seen(slots, tid=None):
    """The link of a sample of this thread now, as (trace id, span id)."""
    place = slots.used.get(tid or threading.get_native_id())
    if place is None:
        return None
    said_at, context_at = place
    layout = find_span_layout(unsampled=False)
    owner = word(said_at)
    if word(owner + 8) == layout.token_type:
        owner = word(owner + layout.token_context_at)
    span_context = ctypes.cast(word(said_at + 8), ctypes.py_object).value
    if owner != word(context_at) or type(span_context) is not SpanContext:
        return None
    if word(owner + layout.variables_at) != word(said_at + 16):
        return None
    if span_context.is_remote or not span_context.is_valid:
        return None
    if not span_context.trace_flags.sampled:
        return None
    return span_context.trace_id, span_context.span_id


def ids(span):
    context = span.get_span_context()
    return context.trace_id, context.span_id


def test_offsets_in_the_running_interpreter_are_determined_reliably():
    assert find_context_offset() == find_context_offset() is not None
    assert find_entered_offset() == find_entered_offset() is not None
    assert find_owner_offset() == find_owner_offset() is not None
    assert find_span_layout(unsampled=False) == find_span_layout(unsampled=False) is not None
    assert find_span_layout(unsampled=True)[:-1] == find_span_layout(unsampled=False)[:-1]


def test_the_layout_matches_objects_in_memory():
    layout = find_span_layout(unsampled=False)
    span_context = SpanContext(7 << 90, 5, is_remote=False, trace_flags=TraceFlags(1))
    items = id(span_context) + layout.items_at
    entries = (span_context.trace_id, span_context.span_id, False, span_context.trace_flags)
    assert [word(items + 8 * n) for n in range(4)] == [id(entry) for entry in entries]
    assert word(id(span_context) + 8) == layout.span_context_type
    assert word(id(span_context.trace_id) + 16) >> layout.size_shift == 4
    assert ctypes.c_uint32.from_address(id(span_context.trace_id) + 24 + 4 * 3).value == 7
    context = contextvars.copy_context()
    token = context.run(get_token)
    assert word(id(token) + 8) == layout.token_type
    assert word(id(token) + layout.token_context_at) == id(context)
    slot = ThreadSlot()
    slot.owner, slot.span_context = token, span_context
    assert word(id(slot) + find_owner_offset()) == id(token)
    assert word(id(slot) + find_owner_offset() + 8) == id(span_context)


def test_unexpected_integer_layouts_disable_links(monkeypatch):
    monkeypatch.setattr(thread_slot, "_DIGIT_BITS", 15)
    assert find_span_layout(unsampled=False) is None
    links = SpanLinks(None)
    links.start()
    assert not links.possible
    assert type(otel_context._RUNTIME_CONTEXT) is ContextVarsRuntimeContext
    links.stop()


def test_a_foreign_runtime_context_is_not_touched(slots, monkeypatch, caplog):
    class Other(ContextVarsRuntimeContext):
        """A runtime context that behaves differently."""

    other = Other()
    monkeypatch.setattr(otel_context, "_RUNTIME_CONTEXT", other)
    links = SpanLinks(slots)
    links.start()
    assert not links.possible
    assert otel_context._RUNTIME_CONTEXT is other
    assert "Other" in links.problem
    assert [record.message for record in caplog.records] == [f"no span links: {links.problem}"]
    links.stop()


def test_free_threaded_python_has_no_links(slots, monkeypatch, caplog):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    links = SpanLinks(slots)
    links.start()
    assert not links.possible
    assert type(otel_context._RUNTIME_CONTEXT) is ContextVarsRuntimeContext
    assert "without the GIL" in caplog.text
    links.stop()


def test_threads_that_inherit_contexts_are_reported(slots, monkeypatch, caplog):
    monkeypatch.setattr(links_module, "sys", SimpleNamespace(
        flags=SimpleNamespace(thread_inherit_context=1), modules=sys.modules
    ))  # fmt: skip
    links = SpanLinks(slots)
    links.start()
    assert links.possible
    assert "thread_inherit_context" in caplog.text
    links.stop()


def test_nested_and_manually_activated_spans_are_linked(slots, links):
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


def test_setting_the_context_variable_directly_clears_the_link(slots, links):
    variable = otel_context._RUNTIME_CONTEXT._current_context
    with TRACER.start_as_current_span("hooked") as span:
        other = trace.set_span_in_context(TRACER.start_span("copied"))
        token = variable.set(other)  # as asgiref does for each variable
        assert seen(slots) is None
        variable.reset(token)
        with TRACER.start_as_current_span("inner") as inner:
            assert seen(slots) == ids(inner)
        assert seen(slots) == ids(span)


def test_a_span_active_at_the_start_is_linked(slots):
    links = SpanLinks(slots)
    with TRACER.start_as_current_span("before") as span:
        links.start()
        assert seen(slots) == ids(span)
        links.stop()


def test_unsampled_and_remote_spans_are_not_linked(slots, links):
    unsampled = TracerProvider(sampler=ALWAYS_OFF).get_tracer("x")
    with unsampled.start_as_current_span("unsampled"):
        assert seen(slots) is None
    remote = SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(1))
    with use_span(NonRecordingSpan(remote)):
        assert seen(slots) is None
        with TRACER.start_as_current_span("served") as span:
            assert seen(slots) == ids(span)
        assert seen(slots) is None


def test_objects_that_are_not_spans_are_counted_without_an_error(slots, links):
    token = otel_context.attach(trace.set_span_in_context("not a span"))
    assert seen(slots) is None
    otel_context.detach(token)
    assert links.failures == 1
    with TRACER.start_as_current_span("fine") as span:
        assert seen(slots) == ids(span)


def test_each_thread_has_its_own_slot_and_releases_it(slots, links):
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


def test_threads_without_a_free_slot_are_counted_and_have_no_links():
    slots = Slots(most=0)
    links = SpanLinks(slots)
    links.start()
    with TRACER.start_as_current_span("x"):
        assert seen(slots) is None
    assert (links.threads, links.without_slot) == (0, 1)
    links.stop()


async def nest(slots, depth, wrong):
    """Nests spans around waits, so that other tasks run between the steps."""
    with TRACER.start_as_current_span("n") as span:
        for _ in range(3):
            if seen(slots) != ids(span):
                wrong.append((depth, span))
            await asyncio.sleep(0)
        if depth:
            await nest(slots, depth - 1, wrong)
            if seen(slots) != ids(span):
                wrong.append((depth, span))


def test_each_step_of_a_task_is_linked_to_its_own_span(slots, links):
    wrong = []

    async def main():
        await asyncio.gather(*(nest(slots, 3, wrong) for _ in range(200)))
        assert seen(slots) is None

    asyncio.run(main())
    assert wrong == []


def test_tasks_and_callbacks_created_in_a_span_are_linked_to_it(slots, links):
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


def test_an_event_loop_is_linked_to_the_span_around_it(slots, links):
    with TRACER.start_as_current_span("around") as span:
        asyncio.run(asyncio.sleep(0))
        assert seen(slots) == ids(span)


def test_an_executor_has_no_span_unless_it_runs_in_a_context(slots, links):
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        TRACER.start_as_current_span("submitting") as span,
    ):
        run = contextvars.copy_context().run
        assert pool.submit(seen, slots).result() is None
        assert pool.submit(run, seen, slots).result() == ids(span)
        assert pool.submit(seen, slots).result() is None


def test_an_unnoticed_context_switch_costs_the_link_but_never_gives_a_wrong_one(slots, links):
    """As in event loops written in C and in libraries with their own worker threads."""
    contexts = [contextvars.copy_context() for _ in range(3)]
    spans = [TRACER.start_span(str(number)) for number in range(3)]

    def begin(span):
        otel_context.attach(trace.set_span_in_context(span))
        return seen(slots)

    assert [c.run(begin, s) for c, s in zip(contexts, spans, strict=True)] == [
        ids(span) for span in spans
    ]
    # Only the last writer's span is known.
    assert [context.run(seen, slots) for context in contexts] == [None, None, ids(spans[2])]
    assert seen(slots) is None


def test_a_context_at_a_reused_address_is_not_confused(slots, links):
    """The context of a new task often has the address of a freed one."""

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


def test_other_event_loops_are_reported(slots, links, caplog):
    uvloop = pytest.importorskip("uvloop")
    wrong = []

    async def main():
        await asyncio.gather(*(check(number) for number in range(50)))

    async def check(_):
        with TRACER.start_as_current_span("n") as span:
            for _ in range(3):
                wrong.append(seen(slots) not in {None, ids(span)})
                await asyncio.sleep(0)

    with TRACER.start_as_current_span("before any loop"):
        pass
    assert links.unhooked_loops == set()
    links.look()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert not any(wrong)
    assert links.unhooked_loops == {"uvloop.Loop"}
    assert len([record for record in caplog.records if "uvloop.Loop" in record.message]) == 1


def test_trio_is_reported_and_its_tasks_never_have_wrong_spans(slots, links, caplog):
    trio = pytest.importorskip("trio")
    wrong = []

    async def check():
        with TRACER.start_as_current_span("n") as span:
            for _ in range(3):
                wrong.append(seen(slots) not in {None, ids(span)})
                await trio.sleep(0)

    async def main():
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(check)

    trio.run(main)
    links.look()
    trio.run(main)
    assert not any(wrong)
    assert links.unhooked_loops == {"trio"}
    assert len([record for record in caplog.records if "trio" in record.message]) == 1


def test_stopping_removes_all_hooks(slots):
    before = (otel_context._RUNTIME_CONTEXT, asyncio.Handle._run)
    links = SpanLinks(slots)
    links.start()
    assert otel_context._RUNTIME_CONTEXT is not before[0]
    links.stop()
    assert (otel_context._RUNTIME_CONTEXT, asyncio.Handle._run) == before


def test_a_forked_child_has_no_hooks_and_the_parent_keeps_its_links(slots, links):
    with TRACER.start_as_current_span("parent") as span:
        pid = os.fork()
        if not pid:
            with TRACER.start_as_current_span("child"):
                unhooked = type(otel_context._RUNTIME_CONTEXT) is ContextVarsRuntimeContext
            os._exit(0 if unhooked else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert seen(slots) == ids(span)


def hold_a_span(leave, spans):
    """Stay in a span until the event is set, then start a new one outside it."""
    with TRACER.start_as_current_span("long") as span:
        spans.put(span)
        leave.wait()
    with TRACER.start_as_current_span("next") as span:
        spans.put(span)
        leave.wait()


@pytest.fixture
def holding():
    """Starts threads in a span; returns them with the event that makes each leave, and its
    spans.
    """
    held = []
    for _ in range(3):
        leave, spans = threading.Event(), queue.SimpleQueue()
        thread = threading.Thread(target=hold_a_span, args=(leave, spans))
        thread.start()
        held.append((thread, leave, spans, spans.get()))
    yield held
    for thread, leave, *_ in held:
        leave.set()
        thread.join()


def test_a_span_active_in_another_thread_before_the_start_is_linked(slots, holding):
    links = SpanLinks(slots)
    links.start()
    assert links.threads == 3
    for thread, _, _, span in holding:
        assert seen(slots, thread.native_id) == ids(span)
    for thread, leave, spans, _ in holding:
        leave.set()
        spans.get()
        thread.join()
    assert links.threads == 0
    assert slots.used == {}
    links.stop()


def test_a_thread_that_ends_in_its_span_releases_its_slot(slots):
    """It never claims the slot; thread ids and identifiers are reused."""
    leave, ready = threading.Event(), threading.Event()

    def attach_and_end():
        otel_context.attach(trace.set_span_in_context(TRACER.start_span("never detached")))
        ready.set()
        leave.wait()

    thread = threading.Thread(target=attach_and_end)
    thread.start()
    ready.wait()
    links = SpanLinks(slots)
    links.start()
    assert links.threads == 1
    leave.set()
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        pass  # the kernel removes the thread a little later
    links.look()
    assert (links.threads, slots.used) == (0, {})
    links.stop()


def test_threads_without_a_context_or_span_get_no_link(slots):
    leave = threading.Event()
    threads = [
        threading.Thread(target=leave.wait),
        threading.Thread(target=contextvars.Context().run, args=(leave.wait,)),
    ]
    for thread in threads:
        thread.start()
    links = SpanLinks(slots)
    links.start()
    assert slots.used == {}
    leave.set()
    for thread in threads:
        thread.join()
    links.stop()


def test_a_thread_that_is_changing_its_span_is_not_linked_to_the_old_one(slots):
    """Its change began before the hooks, which therefore do not see it."""
    changing, changed, leave = threading.Event(), threading.Event(), threading.Event()
    blocked = threading.Lock()
    variable = otel_context._RUNTIME_CONTEXT._current_context

    def attach(context):
        changing.set()
        blocked.acquire()
        variable.set(context)

    def change():
        with TRACER.start_as_current_span("before"):
            attach(trace.set_span_in_context(TRACER.start_span("after")))
            changed.set()
            leave.wait()

    thread = threading.Thread(target=change)
    blocked.acquire()
    thread.start()
    changing.wait()
    while not is_changing_context(thread.ident):
        pass  # still in Event.set()
    links = SpanLinks(slots)
    links.start()
    blocked.release()
    changed.wait()
    assert seen(slots, thread.native_id) is None
    leave.set()
    thread.join()
    links.stop()


def test_starting_while_threads_change_their_spans_gives_no_wrong_links(monkeypatch):
    """Each thread compares its published span with its actual one."""
    going, wrong, right, kept = True, [], collections.Counter(), []
    sampled = Slots()  # read by the kernel program; empty between two runs

    def make_slot():  # outlives the links: unlike the kernel's, our reads do not stop the thread
        kept.append(ThreadSlot())
        return kept[-1]

    monkeypatch.setattr(links_module, "ThreadSlot", make_slot)

    def check(span):
        link = seen(sampled)
        if link not in {None, span and ids(span)}:
            wrong.append((link, span))
        right[link is not None] += 1

    def change():
        while going:
            with TRACER.start_as_current_span("outer") as outer:
                for _ in range(3):
                    check(outer)
                    with TRACER.start_as_current_span("inner") as inner:
                        check(inner)
                    check(outer)
                contextvars.copy_context().run(check, outer)
            check(None)

    def come_and_go():
        while going:
            thread = threading.Thread(target=change_once)
            thread.start()
            thread.join()

    def change_once():
        with TRACER.start_as_current_span("short") as short:
            check(short)

    threads = [threading.Thread(target=each) for each in (change, change, come_and_go)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(150):
            sampled = Slots()
            links = SpanLinks(sampled)
            links.start()
            time.sleep(0.002)
            links.look()
            sampled = Slots()
            links.stop()
    finally:
        sys.setswitchinterval(interval)
        going = False
        for thread in threads:
            thread.join()
    assert not wrong
    assert right[True] > 100
