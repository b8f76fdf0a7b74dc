"""Links of real samples: the kernel program follows the interpreter's objects."""

import contextlib
import contextvars
import os
import threading
import time

import pytest
from opentelemetry.trace import SpanContext, TraceFlags
from services import run

from otel_kprofiler.model import SpanLink
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from otel_kprofiler.sdk.thread_slot import (
    ThreadSlot,
    find_context_offset,
    find_owner_offset,
    find_span_layout,
    get_thread_state,
    get_token,
    make_get_variables,
)

pytestmark = pytest.mark.live

GET_VARIABLES = make_get_variables()
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
UNSAMPLED = TraceFlags(TraceFlags.DEFAULT)


@contextlib.contextmanager
def spans_of(threads, *, unsampled=False):
    config = SamplerConfig(
        samples_per_second=4999,
        stacks="both",
        target_pids=(os.getpid(),),
        span_layout=find_span_layout(unsampled=unsampled),
        span_slots=threads,
    )
    sampler = EbpfSampler(config)
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.close()


def register(sampler, slot):
    owner_at = id(slot) + find_owner_offset()
    context_at = get_thread_state() + find_context_offset()
    return sampler.spans.register(threading.get_native_id(), owner_at, context_at)


def say(slot, owner, span_context):
    """Print the fields stored by a hook, in order."""
    slot.span_context = None
    slot.owner = owner
    slot.variables = GET_VARIABLES(owner)
    slot.span_context = span_context


def span(trace_id, span_id, *, is_remote=False, flags=SAMPLED):
    return SpanContext(trace_id, span_id, is_remote=is_remote, trace_flags=flags)


def link(trace_id, span_id):
    return SpanLink(trace_id.to_bytes(16, "big"), span_id.to_bytes(8, "big"))


def links_of_this_thread(sampler, seconds=0.1):
    """Returns links of this thread's samples while its span stays the same."""
    samples, tid = [], threading.get_native_id()
    sampler.drain()
    began = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    end = time.monotonic() + seconds
    while time.monotonic() < end or not samples:
        samples += [s for s in sampler.drain() if s.tid == tid and s.time_ns > began]
    return {sample.link for sample in samples}


@pytest.mark.parametrize("loader", ["libbpf", "bcc"], indirect=True)
def test_samples_carry_the_span_of_their_thread(loader):
    going, tids = True, {}

    def work(number):
        tids[threading.get_native_id()] = number
        slot = ThreadSlot()
        register(sampler, slot)
        say(slot, get_token(), span(number << 100, number))
        while going:
            pass
        sampler.spans.release(threading.get_native_id())

    with spans_of(2) as sampler:
        workers = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
        for worker in workers:
            worker.start()
        time.sleep(0.1)
        sampler.drain()
        samples, end = [], time.monotonic() + 0.5
        while time.monotonic() < end:
            sampler.wait(0.05)
            samples += sampler.drain()
        going = False
        for worker in workers:
            worker.join()
    linked = [sample for sample in samples if sample.tid in tids]
    assert {sample.tid for sample in linked} == tids.keys()
    for sample in linked:
        number = tids[sample.tid]
        assert sample.link == link(number << 100, number)
    assert all(sample.link is None for sample in samples if sample.tid not in tids)


@pytest.mark.parametrize(
    ("trace_id", "span_id"),
    [
        (1, 1),
        (2**128 - 1, 2**64 - 1),
        (1 << 127, 1 << 63),
        (0x0123456789ABCDEF_FEDCBA9876543210, 0x0F1E2D3C4B5A6978),
        *[(1 << 30 * digits, 1 << 30 * min(digits, 2)) for digits in range(1, 5)],
    ],
)
def test_trace_and_span_ids_of_every_size_are_read(trace_id, span_id):
    with spans_of(1) as sampler:
        slot = ThreadSlot()
        assert register(sampler, slot)
        say(slot, get_token(), span(trace_id, span_id))
        assert links_of_this_thread(sampler) == {link(trace_id, span_id)}
        slot.span_context = None
        assert links_of_this_thread(sampler) == {None}


class Odd(tuple):
    """Not a span context, but with the same layout."""

    __slots__ = ()


def raw(*entries):
    return tuple.__new__(SpanContext, entries)


@pytest.mark.parametrize(
    "odd",
    [
        span(1, 2, is_remote=True),
        span(1, 2, flags=UNSAMPLED),
        span(0, 0),
        Odd(span(1, 2)),
        raw(1.5, 2, False, SAMPLED, {}, True),
        raw(1, "2", False, SAMPLED, {}, True),
        raw(1, True, False, SAMPLED, {}, True),
        raw(1, 2, False, 1, {}, True),
        raw(1 << 150, 2, False, SAMPLED, {}, True),
        raw(-1, 2, False, SAMPLED, {}, True),
        object(),
    ],
)
def test_objects_that_are_not_span_contexts_yield_no_link(odd):
    with spans_of(1) as sampler:
        slot = ThreadSlot()
        assert register(sampler, slot)
        say(slot, get_token(), odd)
        assert links_of_this_thread(sampler) == {None}


def test_unsampled_spans_are_linked_on_request():
    with spans_of(1, unsampled=True) as sampler:
        slot = ThreadSlot()
        register(sampler, slot)
        say(slot, get_token(), span(1, 2, flags=UNSAMPLED))
        assert links_of_this_thread(sampler) == {link(1, 2)}


def test_a_span_is_linked_only_in_its_context():
    """The thread publishes the context itself, or a token created in it."""
    inside = contextvars.copy_context()
    with spans_of(1) as sampler:
        slot = ThreadSlot()
        register(sampler, slot)
        for owner in (inside, inside.run(get_token)):
            say(slot, owner, span(1, 2))
            assert links_of_this_thread(sampler) == {None}
            assert inside.run(links_of_this_thread, sampler) == {link(1, 2)}
            inside.run(get_token)  # variables have changed since
            assert inside.run(links_of_this_thread, sampler) == {None}
        for owner in (None, "no context", contextvars.Context()):
            slot.owner = owner
            assert inside.run(links_of_this_thread, sampler) == {None}


def test_unmapped_memory_costs_only_the_link():
    with spans_of(1) as sampler:
        tid, slot = threading.get_native_id(), ThreadSlot()
        say(slot, get_token(), span(1, 2))
        owner_at = id(slot) + find_owner_offset()
        context_at = get_thread_state() + find_context_offset()
        for addresses, expected in (
            ((8, context_at), None),
            ((owner_at, 8), None),
            ((owner_at, context_at), link(1, 2)),
        ):
            assert sampler.spans.register(tid, *addresses)
            assert links_of_this_thread(sampler) == {expected}


def test_a_changing_span_is_never_read_torn(loader):
    """Each id repeats one number; the owner is right only for even numbers."""
    with spans_of(1) as sampler:
        slot = ThreadSlot()
        register(sampler, slot)
        owners = get_token(), contextvars.copy_context().run(get_token)
        variables = [GET_VARIABLES(owner) for owner in owners]
        samples, number, end = [], 0, time.monotonic() + 2
        while time.monotonic() < end:
            for _ in range(2000):
                number += 1
                changed = span(number << 64 | number, number)
                slot.span_context = None
                slot.owner = owners[number & 1]
                slot.variables = variables[number & 1]
                slot.span_context = changed
            samples += sampler.drain()
        slot.span_context = None
    links = [sample.link for sample in samples if sample.link]
    assert len(links) > 200
    for result in links:
        assert result.trace_id[:8] == result.trace_id[8:] == result.span_id
        assert result.span_id[7] & 1 == 0, "of the context that the thread is in"
    assert len(links) < len(samples)


def test_slots_are_limited_and_released():
    with spans_of(1) as sampler:
        assert sampler.spans.register(1001, 8, 8)
        assert sampler.spans.register(1001, 16, 16), "the same thread again"
        assert not sampler.spans.register(1002, 8, 8)
        assert sampler.spans.release(1001)
        assert not sampler.spans.release(1001)
        assert sampler.spans.register(1002, 8, 8)


BEFORE_THE_START = """
    import sys, threading
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from otel_kprofiler import (
        InMemoryProfileExporter, KernelProfiler, ProfilerProvider, SimpleProfileProcessor
    )

    exporter = InMemoryProfileExporter()
    provider = ProfilerProvider(shutdown_on_exit=False)
    provider.add_profile_processor(SimpleProfileProcessor(exporter))
    profiler = KernelProfiler(provider, samples_per_second=499)
    tracer = TracerProvider().get_tracer("t")

    def samples():
        "Links of the main thread's samples."
        profiler.stop()
        return [
            sample.link and (sample.link.trace_id, sample.link.span_id)
            for window in exporter.get_finished_windows()
            for group in window.profiles[0].resources
            for sample in group.samples
            if sample.tid == threading.get_native_id()
            for _ in sample.timestamps_unix_ns
        ]

    def expect(span):
        context = span.get_span_context()
        expected = context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")
        found = samples()
        assert len(found) > 100, len(found)
        wrong = [link for link in found if link != expected]
        assert len(wrong) < 0.1 * len(found), (len(wrong), len(found))
        assert not any(wrong), set(wrong)
"""


def test_starting_inside_a_span_links_that_span():
    run(
        BEFORE_THE_START
        + """
    with tracer.start_as_current_span("job") as span:
        starter = threading.Thread(target=profiler.start, args=("raise",))
        starter.start()
        starter.join()
        work(0.5)
        expect(span)
        """
    )


def test_wrappers_of_spans_are_linked_by_their_span_context():
    """The class appears while the profiler runs, and once the span is current."""
    run(
        BEFORE_THE_START
        + """
    profiler.start("raise")
    assert "hooks" not in profiler.stats()["span_links"]
    nothing = lambda self, *_, **__: None

    class Wrapper(trace.Span):
        __slots__ = ("inside",)
        end = set_attribute = set_attributes = add_event = update_name = nothing
        set_status = record_exception = is_recording = nothing

        def get_span_context(self):
            return self.inside.get_span_context()

    wrapper = Wrapper()
    wrapper.inside = tracer.start_span("inside")
    with trace.use_span(wrapper):
        while not profiler.stats()["span_links"].get("hooks", {}).get("threads"):
            time.sleep(0.01)
        work(1.5)
        assert profiler.stats()["span_links"]["source"] == "interpreter"
        expect(wrapper)
        """
    )


def test_a_forked_worker_keeps_linking_the_span_entered_before_the_fork():
    run(
        BEFORE_THE_START
        + """
    profiler.start("raise")
    with tracer.start_as_current_span("long") as span:
        pid = os.fork()
        if not pid:
            while profiler.stats()["state"] != "running":
                time.sleep(0.01)
            work(0.5)
            expect(span)
            sys.exit()
        assert os.waitpid(pid, 0)[1] == 0
        """,
        env={"PYTHONWARNINGS": "ignore::DeprecationWarning"},
    )
