"""Local root spans are kept long enough for their names to be added to samples."""

import gc
import sys
import threading
from types import SimpleNamespace

import pytest
from opentelemetry import baggage, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    set_span_in_context,
    use_span,
)

from otel_kprofiler.errors import ConfigError
from otel_kprofiler.model import SpanLink, Stack, WindowSample
from otel_kprofiler.sdk import KernelProfiler, LocalRootSpanProcessor, local_roots
from otel_kprofiler.sdk.local_roots import MAX_NAME_CHARS, LocalRoots, RootNames, describe
from otel_kprofiler.sdk.schema import make_plan, read_settings
from tests.raw_forks import check_in_child
from tests.windows import make_window

STACK = Stack.from_frames(())


@pytest.fixture
def roots(monkeypatch):
    """Returns a LocalRoots for the spans of ``tracer``, separate from the global instance."""
    result = LocalRoots(limit=64)
    result.keep_ended = True
    return result


@pytest.fixture
def processor(roots):
    class Processor(LocalRootSpanProcessor):
        on_start = roots.start
        on_end = roots.end

    return Processor()


@pytest.fixture
def tracer(processor):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider.get_tracer("test")


@pytest.fixture
def now(monkeypatch):
    """Replaces the clock used for expiry, and returns a list that contains the current time."""
    time = [1000.0]
    monkeypatch.setattr(local_roots, "time", SimpleNamespace(monotonic=lambda: time[0]))
    return time


def child_of(tracer, parent, name="child"):
    return tracer.start_span(name, set_span_in_context(parent))


def name_of(roots, span):
    context = span.get_span_context()
    result = roots.find(context.trace_id, context.span_id)
    return result and result.get_name()


def link_of(span):
    context = span.get_span_context()
    return SpanLink(context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big"))


def window_of(*links):
    samples = [WindowSample(STACK, 1, "t", 0, link, (10, 20)) for link in links]
    return make_window(0, 100, ({}, samples), taken=2)


def names_in(window):
    return [sample.link and sample.link.local_root for _, sample in window.samples]


def seen(names, spans):
    names.look([SimpleNamespace(link=link_of(span)) for span in spans])


def test_spans_at_any_depth_are_assigned_the_name_of_their_local_root(roots, tracer):
    top = tracer.start_span("top")
    span = top
    for _ in range(5):
        span = child_of(tracer, span)
        assert name_of(roots, span) == "top"
    assert name_of(roots, tracer.start_span("other")) == "other"
    assert name_of(roots, top) == "top"


def test_a_span_with_a_remote_parent_is_a_local_root(roots, tracer):
    remote = SpanContext(7, 8, is_remote=True, trace_flags=TraceFlags(1))
    top = child_of(tracer, NonRecordingSpan(remote), "GET")
    assert name_of(roots, child_of(tracer, top)) == "GET"
    assert roots.find(7, 8) is None


def test_a_route_set_after_a_span_started_applies_to_all_samples_in_the_span(roots, tracer):
    top = tracer.start_span("GET")
    child = child_of(tracer, top)
    assert name_of(roots, child) == "GET"
    top.set_attribute("http.route", "/orders/{id}")
    assert name_of(roots, child) == "/orders/{id}"
    top.set_attribute("http.request.method", "GET")
    assert name_of(roots, child) == "GET /orders/{id}"
    top.end()
    assert name_of(roots, child) == name_of(roots, top) == "GET /orders/{id}"


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, "name"),
        ({"http.route": "", "http.method": "PUT"}, "name"),
        ({"http.route": 7}, "name"),
        ({"http.route": "/a", "http.method": "PUT"}, "PUT /a"),
        ({"http.route": "/a", "http.request.method": "_OTHER"}, "HTTP /a"),
        ({"http.route": "/" + "a" * 300, "http.request.method": "GET"}, "GET /" + "a" * 195),
    ],
)
def test_requests_with_a_route_are_named_by_method_and_route(roots, tracer, attributes, expected):
    span = tracer.start_span("name", attributes=attributes)
    assert name_of(roots, span) == expected
    span.end()
    assert name_of(roots, span) == expected
    assert len(expected) <= MAX_NAME_CHARS


def test_completed_spans_are_kept_until_earlier_samples_are_drained(roots, tracer, now):
    top = tracer.start_span("top")
    child = child_of(tracer, top)
    child.end()
    top.end()
    assert len(roots) == 0
    roots._rotated_s = now[0]
    for later, expected in ((0.1, "top"), (2.5, "top"), (2.6, "top"), (5.1, None)):
        now[0] = 1000 + later
        roots.forget_ended()
        assert (name_of(roots, child), name_of(roots, top)) == (expected, expected)


def test_completed_spans_are_not_kept_without_a_profiler(roots, tracer):
    roots.stop_keeping()
    span = tracer.start_span("top")
    span.end()
    assert name_of(roots, span) is None
    assert roots.failures == 0


def test_the_oldest_spans_are_evicted_and_counted(roots, tracer):
    spans = [tracer.start_span(f"{number}") for number in range(100)]
    assert len(roots) <= 64
    assert roots.forgotten == 100 - len(roots)
    assert name_of(roots, spans[0]) is None
    assert name_of(roots, spans[-1]) == "99"
    spans[0].end()  # has no effect
    for span in spans:
        span.end()
    assert len(roots) == 0
    for number in range(200):
        tracer.start_span(f"ended {number}").end()
    assert len(roots._ended) <= 64
    assert roots.failures == 0


def test_spans_that_never_end_are_not_kept_alive(roots, tracer):
    span = tracer.start_span("lost")
    context = span.get_span_context()
    del span
    gc.collect()
    result = roots.find(context.trace_id, context.span_id)
    assert result() is None
    assert result.get_name() == ""


def test_spans_started_before_the_processor_was_added_become_local_roots(roots, processor):
    provider = TracerProvider(shutdown_on_exit=False)
    tracer = provider.get_tracer("test")
    early = tracer.start_span("early")
    inner = child_of(tracer, early)
    provider.add_span_processor(processor)
    assert name_of(roots, child_of(tracer, inner)) is None
    assert name_of(roots, child_of(tracer, early)) == "early"
    assert name_of(roots, child_of(tracer, inner)) == "early"
    early.end()
    roots.stop_keeping()
    late = child_of(tracer, early)  # such as a background task
    assert name_of(roots, late) == "early"


def test_a_span_with_the_same_id_in_another_trace_is_not_mistaken_for_the_parent(roots, tracer):
    top = tracer.start_span("top")
    context = top.get_span_context()
    stranger = SpanContext(context.trace_id ^ 1, context.span_id, is_remote=False)
    assert name_of(roots, child_of(tracer, NonRecordingSpan(stranger))) is None
    assert roots.find(context.trace_id ^ 1, context.span_id) is None


def test_spans_without_the_sdks_private_attributes_have_names(roots):
    class Plain:
        name, attributes = "name", None

    assert describe(Plain) == "name"
    Plain.attributes = {"http.route": "/a"}
    assert describe(Plain) == "/a"


class Broken:
    parent = None

    def __init__(self, at, span_id=6):
        self.at, self.span_id = at, span_id

    def get_span_context(self):
        if self.at == "context":
            raise RuntimeError("broken")
        return SpanContext(5, self.span_id, is_remote=False)

    @property
    def attributes(self):
        raise RuntimeError("broken")


@pytest.mark.parametrize("at", ["context", "attributes"])
def test_exceptions_raised_by_spans_are_counted_and_do_not_reach_the_service(roots, at):
    span = Broken(at)
    roots.start(span)
    names = RootNames(roots)
    link = SpanLink((5).to_bytes(16, "big"), (6).to_bytes(8, "big"))
    names.look([SimpleNamespace(link=link)])
    assert names_in(names.name(window_of(link))) == [""]
    roots.end(span)
    assert roots.failures == 2
    assert names.as_dict()["unnamed"]["unknown_span"] == 2


def test_spans_that_raise_exceptions_neither_affect_other_spans_nor_accumulate(roots, tracer):
    broken = [Broken("attributes", span_id) for span_id in range(1, 1001)]
    roots.start(broken[0])
    span, encoded = tracer.start_span("span"), {}
    roots.follow(str.encode, encoded)
    assert encoded == {span.get_span_context().span_id: b"span"}
    for other in broken[1:]:
        roots.start(other)
    assert len(roots) <= 64
    assert roots.failures == 1000
    assert not encoded  # the span is evicted


class Slow(dict):
    """A dictionary of encoded names. Another thread ends a span just before a name is stored."""

    ending = None

    def __setitem__(self, span_id, name):
        if self.ending is not None:
            thread = threading.Thread(target=self.ending.end)
            self.ending = None
            thread.start()
            thread.join()
        super().__setitem__(span_id, name)


def test_the_name_of_a_span_that_ends_while_the_name_is_being_stored_is_dropped(roots, tracer):
    encoded = Slow()
    encoded.ending = early = tracer.start_span("early")
    roots.follow(str.encode, encoded)
    assert not early.is_recording()
    assert not encoded
    encoded.ending = None
    top = tracer.start_span("top")
    top.set_attribute("http.route", "/a")
    encoded.ending = top  # the parent ends while its child's name is being stored
    child = child_of(tracer, top)
    assert encoded == {child.get_span_context().span_id: b"/a"}
    child.end()
    assert not encoded


def test_samples_carry_the_endpoint_name_in_effect_when_the_window_closes(roots, tracer, now):
    names = RootNames(roots)
    top = tracer.start_span("GET")
    child = child_of(tracer, top)
    unknown = SpanLink(b"\1" * 16, b"\2" * 8)
    seen(names, [child, top])
    child.end()
    now[0] += 60  # long enough to evict the spans
    roots.forget_ended()
    roots.forget_ended()
    top.set_attribute("http.route", "/a")
    window = names.name(window_of(link_of(child), link_of(top), None, unknown))
    assert names_in(window) == ["/a", "/a", None, ""]
    assert window.profiles[0].taken == 2
    assert names.as_dict() == {
        "named": 4,
        "unnamed": {"unknown_span": 2, "too_many_names": 0},
        "spans": 1,
        "forgotten_spans": 0,
        "failures": 0,
    }
    assert names_in(names.name(window_of(None))) == [None]


def test_the_number_of_local_root_names_in_a_window_is_limited(roots, tracer):
    names = RootNames(roots, max_names=2)
    spans = [tracer.start_span(name) for name in ("rare", "b", "a", "b", "a")]
    seen(names, spans)
    assert names_in(names.name(window_of(*map(link_of, spans)))) == ["", "b", "a", "b", "a"]
    assert names.named == 8
    assert names.unnamed == {"unknown_span": 0, "too_many_names": 2}


def test_samples_carry_the_selected_baggage_from_their_local_root_span(roots, tracer):
    names = RootNames(roots, max_names=0, baggage_keys=("tenant", "region"))
    names.start()
    context = baggage.set_baggage("tenant", "a" * 300)
    context = baggage.set_baggage("other", "x", context)
    top = tracer.start_span("top", context)
    child = tracer.start_span(
        "child", baggage.set_baggage("region", "eu", set_span_in_context(top))
    )
    plain = tracer.start_span("plain")
    seen(names, [top, child, plain])
    window = window_of(link_of(top), link_of(child), link_of(plain))
    (group,) = window.profiles[0].resources
    group.samples[1] = group.samples[1]._replace(labels=(("job", "1"), ("tenant", "own")))
    window = names.name(window)
    results = [sample.labels for _, sample in window.samples]
    assert results == [(("tenant", "a" * 200),), (("job", "1"), ("tenant", "own")), ()]
    assert names_in(window) == ["", "", ""]
    assert names.unnamed == {"unknown_span": 0, "too_many_names": 0}
    names.stop()
    assert not roots.baggage_keys


def test_baggage_keys_that_cannot_be_labels_are_rejected():
    with pytest.raises(ValueError, match=r"have an attribute thread.id"):
        KernelProfiler(baggage_keys=["thread.id"])
    with pytest.raises(ValueError, match=r"too many baggage_keys: 17 \(at most 16\)"):
        KernelProfiler(baggage_keys=map(str, range(17)))
    environ = {"OTEL_KPROFILER_BAGGAGE_KEYS": "tenant.id, region"}
    assert make_plan(read_settings(environ)).baggage_keys == ("tenant.id", "region")
    with pytest.raises(ConfigError, match=r"baggage_keys.*have an attribute cpu.logical_number"):
        make_plan(read_settings({"OTEL_KPROFILER_BAGGAGE_KEYS": "cpu.logical_number"}))


def test_the_processor_is_added_to_the_global_provider_only_once(monkeypatch):
    provider = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    roots = LocalRoots()
    for _ in range(2):
        names = RootNames(roots)
        names.start()
        names.name(window_of(None))
    ours = [
        span_processor
        for span_processor in provider._active_span_processor._span_processors
        if isinstance(span_processor, LocalRootSpanProcessor)
    ]
    assert len(ours) == 1
    span = provider.get_tracer("test").start_span("top")
    assert name_of(local_roots.process_roots, span) == "top"
    span.end()


@pytest.mark.system
def test_a_forked_child_inherits_the_local_roots_of_its_active_spans(roots, tracer):
    top = tracer.start_span("top")
    inner = child_of(tracer, top)
    elsewhere = tracer.start_span("of another thread")
    tracer.start_span("ended").end()

    def check_child():
        assert [name_of(roots, span) for span in (top, inner, elsewhere)] == ["top", "top", None]
        assert name_of(roots, child_of(tracer, inner)) == "top"
        assert not roots.keep_ended

    with use_span(inner):
        check_in_child(check_child)
    assert name_of(roots, elsewhere) == "of another thread"


@pytest.fixture
def frequent_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
def test_concurrent_threads_do_not_lose_spans(roots, tracer):
    wrong = []

    def serve(number):
        for turn in range(300):
            top = tracer.start_span(f"{number} {turn}")
            child = child_of(tracer, top)
            if name_of(roots, child) != f"{number} {turn}":
                wrong.append((number, turn))
            child.end()
            top.end()

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            roots.forget_ended()
            thread.join(0.001)
    assert not wrong
    assert len(roots) == 0
    assert roots.failures == 0
