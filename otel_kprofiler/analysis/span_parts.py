"""Breaks down span time into user code, kernel code, waits, and work outside the span.

When a thread leaves a span for a while, as an event-loop thread does at each ``await``, its samples
fall into other spans, into no span, or into a wait for events.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, starmap
from operator import attrgetter
from typing import Final, NamedTuple

from otel_kprofiler.analysis.groups import NONE, Group, endpoints, in_kernel, merge_groups
from otel_kprofiler.analysis.occurrences import Key
from otel_kprofiler.analysis.samples import Samples
from otel_kprofiler.model import LOCK_CONTENTION, WaitCause, WindowWait

PART: Final = "part"
"""Name of the grouping that breaks down the time spent in spans."""
TRACE: Final = "trace"
"""Name of the grouping that lists the spans in each trace together."""

USER: Final = "user code"
KERNEL: Final = "kernel"
WAIT: Final = "wait: "
"""Name prefix for time spent waiting, followed by the cause of the wait."""
OTHER_SPANS: Final = "other spans of the trace"
OTHER_TASKS: Final = "other tasks"
"""Name for a thread's work outside the spans of the trace."""
EVENT_LOOP: Final = "event loop waited"

_EVENTS: Final = frozenset({WaitCause.POLL, WaitCause.EPOLL, WaitCause.IO_URING})

_TIME: Final = attrgetter("time")

_Span = tuple[bytes, bytes]
_NO_SPAN: Final[_Span] = (b"", b"")


class SpanParts(NamedTuple):
    """Time spent in the spans of ``traces`` traces, divided into ``parts`` (ns), longest first."""

    traces: int
    parts: list[Group]


class EndpointParts(NamedTuple):
    """A breakdown of the time in spans whose local root is named ``endpoint``.

    An empty ``endpoint`` represents all spans.
    """

    endpoint: str
    parts: SpanParts


class SpanTime(NamedTuple):
    """The time that a service spent in a span, in nanoseconds.

    Attributes:
        trace_id, span_id: ids, in hexadecimal.
        service: ``service.name`` of the process; ``-`` if not set.
        endpoint: name of the local root span; empty if the name is unknown.
        start_ns: Unix time of the first sample.
        user, kernel: time on a CPU, in user mode and in the kernel.
        waited: time off the CPU, including waits for a CPU; in event loops, also the time until the
            span continues.
    """

    trace_id: str
    span_id: str
    service: str
    endpoint: str
    start_ns: int
    user: int
    kernel: int
    waited: int

    @property
    def total(self) -> int:
        """Returns the total time. If several threads ran the span, their times are added up."""
        return self.user + self.kernel + self.waited


class _Event(NamedTuple):
    """A sample of a thread. ``part`` names the part of a span's time that includes the sample."""

    time: int
    weight: int
    part: str
    span: _Span | None
    is_wait: bool
    is_loop: bool


def find_span_parts(chosen: Samples, every: Samples) -> SpanParts:
    """Breaks down the time spent in spans into parts.

    For each trace and thread, the breakdown covers the samples in the spans, and the thread's other
    samples between the first and the last sample in the spans. The parts add up to the duration of
    the spans, within sampling error. If several threads ran the spans, their times are added up.

    The spans are those of the ``chosen`` samples. ``every`` contains all samples from the same
    threads and period.
    """
    return _add_up(every, dict.fromkeys(_spans_of(chosen), ""))[""]


def find_span_times(chosen: Samples, every: Samples) -> list[SpanTime]:
    """Returns the time that each service spent in each span of the ``chosen`` samples.

    A span that leaves its thread, as at each ``await``, counts as waiting while the event loop
    waits. Time that the span's thread spends in other spans, or outside spans, does not count.
    ``every`` contains all samples from the same threads and period. Traces with the most time
    are listed first; the spans within a trace are ordered by their first samples.
    """
    spans, tables = _spans_of(chosen), every.tables
    sums: defaultdict[tuple[_Span, str], Counter[str]] = defaultdict(Counter)
    starts: dict[tuple[_Span, str], int] = {}
    for resource, events in _find_threads(every, spans):
        service = str(tables.resources[resource].attributes.get("service.name", NONE))
        for span, part, weight, time in _find_times(events, spans):
            key = span, service
            sums[key][part] += weight
            starts[key] = min(time, starts.get(key, time))
    roots = zip(tables.links, endpoints(tables.links), strict=True)
    names = {link[:2]: name for link, name in roots if link}
    times = [
        SpanTime(
            span[0].hex(), span[1].hex(), service, names[span], starts[span, service],
            parts[USER], parts[KERNEL], parts[WAIT],
        )
        for (span, service), parts in sums.items()
    ]  # fmt: skip
    totals: Counter[str] = Counter()
    for span_time in times:
        totals[span_time.trace_id] += span_time.total
    return sorted(
        times,
        key=lambda span_time: (-totals[span_time.trace_id], span_time.trace_id, span_time.start_ns),
    )


def _find_times(
    events: Sequence[_Event], spans: Collection[_Span]
) -> Iterator[tuple[_Span, str, int, int]]:
    """Yields tuples of span, part (``USER``, ``KERNEL`` or ``WAIT``), weight and Unix time."""
    loops = [0, *accumulate(event.weight * event.is_loop for event in events)]
    latest: dict[bytes, tuple[int, _Span]] = {}
    for at, event in enumerate(events):
        if event.span is None:
            continue
        trace = event.span[0]
        if trace in latest:
            left_at, last = latest[trace]
            if last in spans:
                yield last, WAIT, loops[at] - loops[left_at + 1], events[left_at].time
        latest[trace] = at, event.span
        if event.span in spans:
            yield event.span, WAIT if event.is_wait else event.part, event.weight, event.time


def find_endpoint_parts(samples: Samples, limit: int = 20) -> list[EndpointParts]:
    """Breaks down the time in all spans together, then in each endpoint's spans.

    ``samples`` must include all samples from the threads that were in spans. Selects the ``limit``
    endpoints with the most samples. The result is empty if no sample belongs to a span.
    """
    links = samples.tables.links
    counts: Counter[int] = Counter()
    for link, count in zip(samples.links, samples.counts(), strict=True):
        counts[link] += count
    names: dict[_Span, str] = {}
    totals: Counter[str] = Counter()
    for link, name in enumerate(endpoints(links)):
        if (span := links[link]) and counts[link]:
            names[span[:2]] = name
            totals[name] += counts[link]
    if not names:
        return []
    parts = _add_up(samples, names)
    largest = [name for name, _ in totals.most_common() if name][:limit]
    return [EndpointParts(name, parts[name]) for name in ("", *largest)]


def _spans_of(chosen: Samples) -> set[_Span]:
    links = chosen.tables.links
    return {link[:2] for link in map(links.__getitem__, set(chosen.links)) if link}


class _Sums:
    def __init__(self) -> None:
        self._traces: set[bytes] = set()
        self._parts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])

    def add(self, trace: bytes, parts: Iterable[tuple[str, int, int]]) -> None:
        self._traces.add(trace)
        for part, weight, count in parts:
            sums = self._parts[part]
            sums[0] += weight
            sums[1] += count

    def result(self) -> SpanParts:
        parts = merge_groups(
            [starmap(_part, ((part, *sums) for part, sums in self._parts.items()))]
        )
        return SpanParts(len(self._traces), [part for part in parts if part.own])


def _add_up(samples: Samples, names: Mapping[_Span, str]) -> defaultdict[str, SpanParts]:
    """Returns breakdowns by local root name; the empty name stands for all spans combined."""
    sums: defaultdict[str, _Sums] = defaultdict(_Sums)
    for _, events in _find_threads(samples, names):
        for name, trace, parts in _find_parts(events, names):
            sums[name].add(trace, parts)
    results = {name: of_name.result() for name, of_name in sums.items()}
    return defaultdict(_Sums().result, results)


def _find_parts(
    events: Sequence[_Event], names: Mapping[_Span, str]
) -> Iterator[tuple[str, bytes, list[tuple[str, int, int]]]]:
    """Yields a breakdown of a thread's time for each pair of local root name and trace.

    A breakdown covers the time from the first to the last sample with that local root and trace.
    """
    places: defaultdict[bytes, list[int]] = defaultdict(list)
    for at, event in enumerate(events):
        if event.span:
            places[event.span[0]].append(at)
    weights = [0, *accumulate(event.weight for event in events)]
    loops = [0, *accumulate(event.weight * event.is_loop for event in events)]
    loop_counts = [0, *accumulate(event.is_loop for event in events)]
    for trace, in_trace in places.items():
        wanted: defaultdict[str, list[int]] = defaultdict(list)  # indices into `in_trace` by name
        for index, at in enumerate(in_trace):
            name = names.get(events[at].span or _NO_SPAN)
            if name is not None:
                wanted[""].append(index)
                if name:
                    wanted[name].append(index)
        in_spans = [0, *accumulate(events[at].weight for at in in_trace)]
        for name, indices in wanted.items():
            first, last = indices[0], indices[-1] + 1
            start, end = in_trace[first], in_trace[last - 1] + 1
            chosen = [events[in_trace[index]] for index in indices]
            inside, inside_count = in_spans[last] - in_spans[first], last - first
            loop, loop_count = loops[end] - loops[start], loop_counts[end] - loop_counts[start]
            weight = sum(event.weight for event in chosen)
            rest = weights[end] - weights[start] - loop - inside
            rest_count = end - start - loop_count - inside_count
            yield (
                name,
                trace,
                [
                    *((event.part, event.weight, 1) for event in chosen),
                    (OTHER_SPANS, inside - weight, inside_count - len(chosen)),
                    (EVENT_LOOP, loop, loop_count),
                    (OTHER_TASKS, rest, rest_count),
                ],
            )


def _part(name: str, weight: int, count: int) -> Group:
    return Group(Key(name), weight, weight, weight if name == KERNEL else 0, count)


def _complete(events: list[_Event]) -> list[_Event]:
    """Assigns waits without a span to the span that the samples before and after them share."""
    completed, last, pending = list[_Event](), None, list[int]()
    for event in events:
        if event.is_wait and event.span is None and not event.is_loop:
            pending.append(len(completed))
        elif not event.is_loop:
            if event.span and event.span == last:
                for at in pending:
                    completed[at] = completed[at]._replace(span=last)
            pending.clear()
            last = event.span
        completed.append(event)
    return completed


def _find_threads(samples: Samples, spans: Collection[_Span]) -> Iterator[tuple[int, list[_Event]]]:
    """Yields the Resource index and the samples from each thread in which one of the spans ran."""
    tables, values = samples.tables, samples.values
    links = [link[:2] if link else None for link in tables.links]
    kernel = in_kernel(tables)
    # Waits for locks are already counted as time on or off a CPU.
    factors = [
        origin.profile.measure(1)
        if origin.profile.kind.is_time and origin.profile.kind != LOCK_CONTENTION
        else 0
        for origin in tables.origins
    ]
    threads = [(thread.resource, thread.tid) for thread in tables.threads]
    wanted = {
        threads[thread]
        for thread, link in zip(samples.threads, samples.links, strict=True)
        if links[link] in spans
    }
    events: defaultdict[tuple[int, int], list[_Event]] = defaultdict(list)
    columns = zip(
        samples.origins, samples.threads, samples.stacks, samples.links, samples.waits,
        samples.spans(), strict=True,
    )  # fmt: skip
    for origin, thread, stack, link, at, (start, end) in columns:
        factor, span, wait = factors[origin], links[link], tables.waits[at]
        if not factor or threads[thread] not in wanted:
            continue
        part = _name_part(wait, is_kernel=kernel[stack])
        is_loop = wait is not None and wait.cause in _EVENTS and span is None
        weights = values[start:end] if values else [1] * (end - start)
        events[threads[thread]] += [
            _Event(time, weight * factor, part, span, wait is not None, is_loop)
            for time, weight in zip(samples.times[start:end], weights, strict=True)
        ]
    for (resource, _), unordered in events.items():
        yield resource, _complete(sorted(unordered, key=_TIME))


def _name_part(wait: WindowWait | None, *, is_kernel: bool) -> str:
    if wait is not None:
        return WAIT + (wait.cause.label if wait.cause else wait.state.label)
    return KERNEL if is_kernel else USER
