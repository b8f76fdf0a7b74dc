"""The breakdown of each endpoint's time matches a brute-force calculation."""

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.analysis import find_endpoint_parts, find_span_parts, load_samples, span_parts
from otel_kprofiler.model import (
    KERNEL_SIDE,
    OFF_CPU,
    ON_CPU,
    USER_SIDE,
    Frame,
    Line,
    Profile,
    Resource,
    ResourceSamples,
    SpanLink,
    Stack,
    WaitCause,
    WaitState,
    Window,
    WindowSample,
    WindowWait,
)

MS = 1_000_000
RESOURCE = Resource({"process.pid": 7})
STACKS = [
    Stack.from_frames([Frame(None, 1, (Line("work"),), 0, side)])
    for side in (KERNEL_SIDE, USER_SIDE)
]
LINKS = [None] + [
    SpanLink(bytes([trace]) * 16, bytes([span]) * 8, endpoint)
    for trace in (1, 2)
    for span, endpoint in ((3, "GET /a"), (4, "GET /a"), (5, "GET /b"), (6, ""))
]

events = st.tuples(
    st.integers(0, 40), st.sampled_from(LINKS), st.integers(1, 2),
    st.sampled_from([*STACKS, WaitCause.EPOLL, WaitCause.FUTEX]), st.integers(1, 5),
)  # fmt: skip


@st.composite
def loaded(draw):
    """Draws samples and waits of two threads, not sorted by time."""
    running, waiting = [], []
    for at, link, tid, what, length in draw(st.lists(events, max_size=30)):
        if isinstance(what, Stack):
            times = [(at + more) * MS for more in range(length)]
            running.append(WindowSample(what, tid, "shop", 0, link, times))
        else:
            wait = WindowWait(WaitState.INTERRUPTIBLE, what)
            waiting.append(
                WindowSample(
                    STACKS[0], tid, "shop", 0, link, [at * MS], [length * MS], (), wait
                )
            )  # fmt: skip
    profiles = [
        Profile(ON_CPU, MS, [ResourceSamples(RESOURCE, running)]),
        Profile(OFF_CPU, 0, [ResourceSamples(RESOURCE, waiting)]),
    ]
    return load_samples([Window(0, 10**9, profiles)])


def find_parts(samples, every, spans):
    """Returns the number of traces that contain the spans, and the totals for each span part.

    Each trace is scanned from its first sample in the spans to its last.
    """
    traces, parts = set(), defaultdict(Counter)
    for _, timeline in span_parts._find_threads(samples, every):
        for trace in {event.span[0] for event in timeline if event.span in spans}:
            wanted = [
                at
                for at, event in enumerate(timeline)
                if event.span in spans and event.span[0] == trace
            ]
            traces.add(trace)
            for event in timeline[wanted[0] : wanted[-1] + 1]:
                if event.span in spans and event.span[0] == trace:
                    part = event.part
                elif event.span and event.span[0] == trace:
                    part = span_parts.OTHER_SPANS
                else:
                    part = span_parts.EVENT_LOOP if event.is_loop else span_parts.OTHER_TASKS
                kernel = event.weight if part == span_parts.KERNEL else 0
                parts[part].update(weight=event.weight, kernel=kernel, samples=1)
    return len(traces), {part: dict(sums) for part, sums in parts.items()}


def plain(result):
    return result.traces, {
        group.key.name: {"weight": group.own, "kernel": group.kernel, "samples": group.samples}
        for group in result.parts
    }


@settings(max_examples=150, deadline=None)
@given(loaded())
def test_span_parts_of_each_endpoint_match_brute_force(samples):
    links = {link for link in map(samples.tables.links.__getitem__, samples.links) if link}
    names = {link[:2]: link.local_root for link in links}
    results = find_endpoint_parts(samples)
    assert {name for name, _ in results} == ({"", *names.values()} if names else set())
    for endpoint, result in results:
        spans = {span for span, name in names.items() if endpoint in {"", name}}
        assert plain(result) == find_parts(samples, names, spans)


@settings(max_examples=50, deadline=None)
@given(loaded())
def test_the_breakdown_of_span_time_matches_a_brute_force_search(samples):
    links = {link[:2] for link in map(samples.tables.links.__getitem__, samples.links) if link}
    assert plain(find_span_parts(samples, samples)) == find_parts(samples, links, links)


def test_each_threads_timeline_is_scanned_once_regardless_of_the_number_of_endpoints(monkeypatch):
    passes, find = [], span_parts._find_parts
    monkeypatch.setattr(span_parts, "_find_parts", lambda *args: passes.append(1) or find(*args))
    samples = [
        WindowSample(
            STACKS[0], tid, "shop", 0, SpanLink(bytes([at]) * 16, b"\1" * 8, f"{at}"), [at]
        )
        for tid in (1, 2)
        for at in range(1, 20)
    ]
    profile = Profile(ON_CPU, MS, [ResourceSamples(RESOURCE, samples)])
    assert len(find_endpoint_parts(load_samples([Window(0, 10**9, [profile])]))) == 20
    assert len(passes) == 2  # one pass for each thread
