"""The BPF program finds spans in the interpreter's objects or in published records."""

import contextlib
import os
import threading
import time

import pytest
import samplers
from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from services import run

from otel_kprofiler.bpf import BccLoader
from otel_kprofiler.model import SpanLink
from otel_kprofiler.sdk.object_layout import find_span_layout
from otel_kprofiler.sdk.span_path import find_span_path
from tests.further import further

pytestmark = pytest.mark.live

SAMPLED = TraceFlags(TraceFlags.SAMPLED)
UNSAMPLED = TraceFlags(TraceFlags.DEFAULT)


def sampling(*, unsampled=False):
    return samplers.sampling(
        samples_per_second=4999,
        stacks="both",
        target_pids=(os.getpid(),),
        span_layout=find_span_layout(unsampled=unsampled),
        span_path=find_span_path(),
    )


@contextlib.contextmanager
def current(span_context):
    """Makes a span with this span context current; the context may be an invalid object."""
    token = context.attach(trace.set_span_in_context(NonRecordingSpan(span_context)))
    try:
        yield
    finally:
        context.detach(token)


def span(trace_id, span_id, *, is_remote=False, flags=SAMPLED):
    return SpanContext(trace_id, span_id, is_remote=is_remote, trace_flags=flags)


def link(trace_id, span_id):
    return SpanLink(trace_id.to_bytes(16, "big"), span_id.to_bytes(8, "big"))


def links_of_this_thread(sampler, seconds=0.1):
    """Samples this thread, without changing its current span, and returns the samples' links."""
    samples, tid = [], threading.get_native_id()
    sampler.drain()
    began = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    end = time.monotonic() + seconds
    while time.monotonic() < end or not samples:
        samples += [s for s in sampler.drain() if s.tid == tid and s.time_ns > began]
    return {sample.link for sample in samples}


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
    with sampling() as sampler:
        with current(span(trace_id, span_id)):
            assert links_of_this_thread(sampler) == {link(trace_id, span_id)}
        assert links_of_this_thread(sampler) == {None}


class Odd(tuple):
    """An object that has the layout of a span context, but is not one."""

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
    with sampling() as sampler, current(odd):
        assert links_of_this_thread(sampler) == {None}


def test_samples_are_linked_to_unsampled_spans_if_enabled():
    with sampling(unsampled=True) as sampler, current(span(1, 2, flags=UNSAMPLED)):
        assert links_of_this_thread(sampler) == {link(1, 2)}


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
            for _, sample in window.samples
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


def test_a_profiler_started_inside_a_span_links_samples_to_that_span():
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


def test_samples_in_wrapped_spans_are_linked_by_the_wrappers_span_context():
    """The wrapper class is defined after the profiler starts."""
    run(
        BEFORE_THE_START
        + """
    profiler.start("raise")
    assert "other_classes" not in profiler.stats()["span_links"]
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
        while "other_classes" not in profiler.stats()["span_links"]:
            work(0.01)
        assert profiler.flush_window(60_000)
        exporter.clear()  # earlier samples have no link
        work(1.5)
        assert profiler.stats()["span_links"]["source"] == "interpreter"
        expect(wrapper)
        """
    )


def test_samples_from_a_forked_worker_are_linked_to_the_span_entered_before_the_fork():
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


WITHOUT_A_PATH = (
    BEFORE_THE_START
    + """
    import dataclasses
    from otel_kprofiler.sdk import plan
    from otel_kprofiler.sdk.span_path import UnprovenError

    def find_no_path():
        raise UnprovenError("the layout of this interpreter's objects is unknown")
    """
)


NO_PATH = "plan.find_span_path = find_no_path"
BCC = "profiler._plan = dataclasses.replace(profiler._plan, loader='bcc')"


@pytest.mark.parametrize(
    ("change", "is_published"), [(NO_PATH, True), (NO_PATH, False), *further((BCC, True))]
)
def test_samples_are_linked_by_thread_contexts_if_objects_cannot_be_read(change, is_published):
    if change == BCC and not BccLoader.is_installed():
        pytest.skip("needs python3-bpfcc")
    run(
        WITHOUT_A_PATH
        + f"""
    {change}
    profiler._plan = dataclasses.replace(profiler._plan, publish_thread_contexts={is_published})
    """
        + """
    profiler.start("raise")
    while profiler.stats()["samples"] == 0:
        work(0.1)
    assert profiler.flush_window(60_000)
    exporter.clear()
    with tracer.start_as_current_span("linked") as span:
        work(0.5)
        stats = profiler.stats()["span_links"]
        assert (stats["source"], stats["problem"]) == ("thread_contexts", ""), stats
        expect(span)
        """
    )


def test_samples_are_not_linked_to_a_published_span_that_is_not_sampled():
    run(
        WITHOUT_A_PATH
        + f"""
    {NO_PATH}
    """
        + """
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
    profiler.start("raise")
    while profiler.stats()["samples"] == 0:
        work(0.1)
    with TracerProvider(sampler=ALWAYS_OFF).get_tracer("t").start_as_current_span("off"):
        work(0.5)
        assert not any(samples())
        """
    )
