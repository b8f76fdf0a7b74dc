"""Records the spans and samples from a service, and compares them.

Spans are read from a source: ``interpreter`` (the interpreter's objects, as an embedded profiler
does) or ``record`` (the thread context that any profiler can read).
"""

import bisect
import contextlib
import os
import threading
import time
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from otel_kprofiler import thread_context
from otel_kprofiler.bpf import LibbpfLoader
from otel_kprofiler.host import Access
from otel_kprofiler.model import SpanLink
from otel_kprofiler.processes import ProcessContexts
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from otel_kprofiler.sdk.object_layout import find_span_layout
from otel_kprofiler.sdk.own_contexts import OwnContexts
from otel_kprofiler.sdk.span_path import find_span_path

HERTZ = 4999
SOURCES = ("interpreter", "record")
LATEST_S = 30
records_are_read = threading.Event()
"""Set when samples are first linked to spans of non-SDK classes."""


def boot_ns():
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def link_of(span, source):
    """Returns the link expected on samples in a span; None if no link is expected."""
    context = span.get_span_context()
    is_local = context.trace_flags.sampled and not context.is_remote
    if not context.is_valid or not (is_local or source == "record"):
        return None
    return SpanLink(context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big"))


class Note(NamedTuple):
    """An interval during which a thread was in a single span, or in no span."""

    start_ns: int
    end_ns: int
    link: SpanLink | None


class Truth:
    """The spans that the service itself records, by thread. Thread-safe."""

    def __init__(self, source="interpreter"):
        self.source = source
        self.notes = {}

    def observe(self, span=None):
        """Does work inside a span, by default the API's current span, and records the interval."""
        link = link_of(span or trace.get_current_span(), self.source)
        notes = self.notes.setdefault(threading.get_native_id(), [])
        start = boot_ns()
        for _ in range(40):
            os.stat("/proc/self")
            sum(range(50))
        notes.append(Note(start, boot_ns(), link))


class Outcome(NamedTuple):
    """The numbers of samples in logged intervals, by correctness of their links.

    Attributes:
        right: samples taken in a span and linked to that span.
        unlinked: samples taken in a span, but without a link.
        outside: samples outside of all spans, without a link.
        wrong: samples that are linked to a span that was not current.
    """

    right: int
    unlinked: int
    outside: int
    wrong: int

    @property
    def samples(self):
        return sum(self)

    @property
    def linked_share(self):
        return self.right / max(self.right + self.unlinked, 1)

    def __add__(self, other):
        return Outcome(*map(sum, zip(self, other, strict=True)))


NOTHING = Outcome(0, 0, 0, 0)


def compare(samples, truth, *, misses_first=False):
    """Counts right, wrong and missing links of samples taken in their threads' logged intervals.

    With ``misses_first``, unlinked samples in the main thread's first span are skipped.
    """
    counts = dict.fromkeys(Outcome._fields, 0)
    links = (note.link for note in truth.notes.get(os.getpid(), ()))
    missed = next(filter(None, links), None) if misses_first else None
    starts = {tid: [note.start_ns for note in notes] for tid, notes in truth.notes.items()}
    for sample in samples:
        notes = truth.notes.get(sample.tid)
        place = bisect.bisect_right(starts[sample.tid], sample.time_ns) - 1 if notes else -1
        if place < 0 or sample.time_ns >= notes[place].end_ns:
            continue
        expected = notes[place].link
        if sample.link == expected:
            counts["right" if expected else "outside"] += 1
        elif sample.link or sample.tid != os.getpid() or expected != missed:
            counts["wrong" if sample.link else "unlinked"] += 1
    return Outcome(**counts)


def open_sampler(source):
    config = SamplerConfig(
        samples_per_second=HERTZ,
        stacks="both",
        max_frames=4,
        user_unwinding="frame_pointers",
        target_pids=(os.getpid(),),
        span_layout=None if source == "record" else find_span_layout(unsampled=False),
        span_path=find_span_path() if source == "interpreter" else None,
    )
    return EbpfSampler(config, loader=LibbpfLoader())


def follow_records(sampler):
    """Publishes this process's thread records, and waits until the sampler reads them."""
    thread_context.start({"service.name": "spans"})
    contexts = ProcessContexts(Access(), first_look_s=0, answer_timeout_s=1)
    contexts.follow_threads(sampler.contexts)
    tracer = TracerProvider().get_tracer("first")
    until = time.monotonic() + LATEST_S
    processes = set()
    while True:
        with tracer.start_as_current_span("first"):
            end = time.monotonic() + 0.02
            while time.monotonic() < end:
                os.stat("/proc/self")
        samples = sampler.drain()
        if any(sample.link for sample in samples):
            return contexts
        assert time.monotonic() < until, "no sample has a span"
        processes |= {sample.process for sample in samples}
        for process in processes:
            contexts.expect(process)
        contexts.look(processes)


def follow_contexts(contexts, drain):
    """Waits until a sample has registered this process's thread contexts, if spans need them."""
    contexts.prepare()
    until = time.monotonic() + LATEST_S
    while contexts.is_needed and not contexts.is_registered:
        assert time.monotonic() < until
        assert not contexts.problem
        os.stat("/proc/self")
        drain()
    assert not contexts.problem


@contextlib.contextmanager
def sampling(source="interpreter"):
    """Samples this process during the block. Yields a list that is filled when the block ends.

    Spans whose class is outside the SDK are always read from records, regardless of ``source``.
    """
    sampler = open_sampler(source)
    sampler.start()
    samples, ended = [], threading.Event()
    contexts = OwnContexts(Access(), sampler.contexts, follows_spans=sampler.follows_spans)

    def drain_once():
        drained = sampler.drain()
        if source == "interpreter":
            contexts.prepare()
            contexts.look(drained)
            if contexts.is_registered:
                records_are_read.set()
        samples.extend(drained)

    def drain():
        while not ended.wait(0.05):
            drain_once()
        sampler.stop()
        drain_once()

    with contextlib.ExitStack() as stack:
        stack.callback(sampler.close)
        if source == "record":
            stack.callback(follow_records(sampler).close)
            records_are_read.set()
        else:
            follow_contexts(contexts, drain_once)
        samples.clear()
        thread = threading.Thread(target=drain, name="drain")
        thread.start()
        try:
            yield samples
        finally:
            ended.set()
            thread.join()
