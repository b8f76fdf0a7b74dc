"""Names samples after their span's local root, the trace's topmost span in this process.

A span processor records each span's local root when the span starts, and the root's name when the
root ends. No code runs when the current span changes. The profiler looks up each sample's span when
it drains the sample. The profiler looks up the roots' names only when it closes a window, because
web frameworks set a span's route late.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from opentelemetry import baggage, trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import SpanContext

from otel_kprofiler import forks
from otel_kprofiler.forks import ForkAware, ForkStep
from otel_kprofiler.model import (
    MAX_LABEL_VALUE_CHARS,
    LabelSet,
    RawSample,
    SpanLink,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import describe_request
from otel_kprofiler.sdk.pacing import Pacer, paced

MAX_SPANS: Final = 65_536
MAX_NAMES: Final = 128
"""Maximum number of distinct root names in a window. Names with the fewest samples are dropped."""
MAX_NAME_CHARS: Final = 200
_KEEP_S: Final = 2.0
"""Minimum time to keep ended spans, whose samples may still be in the ring."""

_TRACE_ID, _SPAN_ID, _IS_REMOTE = 0, 1, 2
"""Indices into a span context, which is a tuple. Indexing is faster than using properties."""


class LocalRoot(weakref.ref[Any]):
    """A weak reference to a span without a parent in this process.

    The reference does not keep the span alive: the name of a span that never ends is lost when the
    service drops the span. When a span ends, its name is kept.

    Attributes:
        name: the span's name when it ended; None until then.
        labels: the labels derived from the baggage that was current when the span started.
        encoded: the name last published by :meth:`LocalRoots.follow`, as a string and as bytes.
    """

    __slots__ = ("context", "encoded", "labels", "name")

    context: SpanContext
    name: str | None
    labels: LabelSet
    encoded: tuple[str, bytes]

    def get_name(self) -> str:
        """Returns the span's current name. Propagates exceptions raised by the span's class."""
        if self.name is not None:
            return self.name
        span = self()
        return "" if span is None else describe(span)


def describe(span: Any) -> str:
    """Returns a request span's method and ``http.route``, or else its name, truncated if long."""
    try:
        get = span._attributes._dict.get  # noqa: SLF001 - the public property takes a microsecond
    except AttributeError:
        get = (span.attributes or {}).get
    name = describe_request(get) or str(span.name)
    return name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS]


class LocalRoots(ForkAware):
    """The local roots of active and recently ended spans. Thread-safe.

    The class has no lock: each operation on a dictionary with integer keys is atomic, and values
    that another thread may change between two operations are checked again. However, encoding a
    name may take the encoder's lock.

    At most ``limit`` active and ``limit`` ended spans are kept; the oldest are dropped first.

    Attributes:
        forgotten: the number of spans that were forgotten because there were too many.
        failures: the number of exceptions that spans or the encoder raised.
    """

    def __init__(self, limit: int = MAX_SPANS) -> None:
        self._limit = limit
        self._active: dict[int, LocalRoot] = {}
        self._ended: dict[int, LocalRoot] = {}
        self._ended_before: dict[int, LocalRoot] = {}
        self._rotated_s = time.monotonic()
        self.keep_ended = False
        self.baggage_keys: tuple[str, ...] = ()
        self.forgotten = self.failures = 0
        self._encode: Callable[[str], bytes] | None = None
        self._encoded: dict[int, bytes] = {}
        forks.register(ForkStep.RENEW, self)

    def follow(self, encode: Callable[[str], bytes], encoded: dict[int, bytes]) -> None:
        """Start maintaining ``encoded``, the encoded root name of each active span, by span id.

        An entry is the name that the root had when one of its spans last started. An entry is
        removed when its span ends. Exceptions raised by ``encode`` are counted as failures.
        """
        self._encode, self._encoded = encode, encoded
        for span_id, root in tuple(self._active.items()):
            try:
                self._keep_encoded(encode, span_id, root)
            except Exception:  # noqa: BLE001 - counted; the other spans are published
                self.failures += 1

    def _keep_encoded(self, encode: Callable[[str], bytes], span_id: int, root: LocalRoot) -> None:
        name = root.get_name()
        if name != root.encoded[0]:
            root.encoded = name, encode(name)
            root_id = root.context[_SPAN_ID]
            if root_id in self._active:
                self._store(root_id, root.encoded[1])
        self._store(span_id, root.encoded[1])

    def _store(self, span_id: int, name: bytes) -> None:
        self._encoded[span_id] = name
        if span_id not in self._active:  # the span was ended by a different thread
            self._encoded.pop(span_id, None)

    def __len__(self) -> int:
        return len(self._active)

    def start(self, span: Any, parent_context: Context | None = None) -> None:
        """Record the start of a span; never raises."""
        try:
            forks.catch_up()  # in a forked child, this may be the only call into the package
            context, parent, active = span.get_span_context(), span.parent, self._active
            if parent is None or parent[_IS_REMOTE]:
                root = _make_root(span, context)
                if self.baggage_keys:
                    root.labels = self._read_baggage(parent_context)
                active[context[_SPAN_ID]] = root
            else:
                active_root = active.get(parent[_SPAN_ID])
                if active_root is None or active_root.context[_TRACE_ID] != parent[_TRACE_ID]:
                    active_root = self._find_root_of(parent, parent_context)
                    if active_root is None:
                        return
                active[context[_SPAN_ID]] = root = active_root
            if len(active) > self._limit:
                self._forget_oldest(active)
            if self._encode is not None:  # the last step, because it may raise
                self._keep_encoded(self._encode, context[_SPAN_ID], root)
        except Exception:  # noqa: BLE001 - counted; the service continues
            self.failures += 1

    def end(self, span: Any) -> None:
        """Record the end of a span; never raises."""
        try:
            span_id = span.get_span_context()[_SPAN_ID]
            root = self._active.pop(span_id, None)
            if root is None:
                return
            self._encoded.pop(span_id, None)
            if root.context[_SPAN_ID] == span_id:
                root.name = describe(span)
            if self.keep_ended:
                ended = self._ended
                ended[span_id] = root
                if len(ended) > self._limit:
                    self._forget_oldest(ended)
        except Exception:  # noqa: BLE001 - counted; the service continues
            self.failures += 1

    def find(self, trace_id: int, span_id: int) -> LocalRoot | None:
        """Returns the local root of a span; None if unknown."""
        # Spans move from one dictionary to the next after they end, so search in this order.
        for spans in (self._active, self._ended, self._ended_before):
            root = spans.get(span_id)
            if root is not None and root.context.trace_id == trace_id:
                return root
        return None

    def forget_ended(self) -> None:
        """Forget spans that ended a while ago (see ``_KEEP_S``). Call after each drain."""
        now = time.monotonic()
        if now - self._rotated_s > _KEEP_S:
            self._rotated_s = now
            self._ended_before, self._ended = self._ended, {}

    def stop_keeping(self) -> None:
        """Stop keeping ended spans."""
        self.keep_ended = False
        self.baggage_keys = ()
        self._ended_before, self._ended = {}, {}

    def _forget_oldest(self, spans: dict[int, LocalRoot]) -> None:
        """Forget many of the oldest spans at a time, because each call copies all keys."""
        # Copy the keys in one step: iterating over the dictionary would fail if another thread
        # changed it.
        for span_id in list(spans)[: max(1, self._limit // 16)]:
            if spans.pop(span_id, None) is not None:
                self.forgotten += 1
            if spans is self._active:
                self._encoded.pop(span_id, None)

    def _read_baggage(self, context: Context | None) -> LabelSet:
        entries = [(key, baggage.get_baggage(key, context)) for key in self.baggage_keys]
        return tuple(
            sorted(
                (key, str(value)[:MAX_LABEL_VALUE_CHARS])
                for key, value in entries
                if value is not None
            )
        )

    def _find_root_of(self, parent: Any, parent_context: Context | None) -> LocalRoot | None:
        """Returns the local root of a parent span that is missing from the active spans."""
        root = self.find(parent.trace_id, parent.span_id)
        if root is not None:
            return root
        span: Any = trace.get_current_span(parent_context)
        if span.get_span_context() != parent or not isinstance(span, ReadableSpan):
            return None
        above = span.parent
        if above is not None and not above.is_remote:
            return self.find(above.trace_id, above.span_id)
        root = _make_root(span, parent)
        if span.end_time is None:
            self._active[parent.span_id] = root
        else:
            root.name = describe(span)
        return root

    def after_fork_in_child(self) -> None:
        """Keep only the forking thread's spans, because other threads do not exist in the child."""
        context = trace.get_current_span().get_span_context()
        current = self.find(context.trace_id, context.span_id)
        self._active = {key: root for key, root in self._active.items() if root is current}
        for span_id in self._encoded.keys() - self._active.keys():
            del self._encoded[span_id]
        self.stop_keeping()
        self.forgotten = self.failures = 0


def _make_root(span: Any, context: SpanContext) -> LocalRoot:
    root = LocalRoot(span)
    root.context, root.name, root.labels, root.encoded = context, None, (), ("", b"")
    return root


process_roots: Final = LocalRoots()
"""The local roots of this process's spans, for all tracer providers."""


class LocalRootSpanProcessor(SpanProcessor):
    """Allows a :class:`KernelProfiler` to name samples after the local root of their span.

    When the profiler starts, it adds a processor to the global TracerProvider. If the service uses
    a different provider, it must add a processor itself. To name spans that are already active when
    the profiler starts, add a processor before the spans start. A processor costs two to three
    microseconds per span, never raises an exception, and does nothing when the current span
    changes.
    """

    on_start = process_roots.start  # saves a call per span
    on_end = process_roots.end


def watch_provider() -> None:
    """Start recording spans from the global TracerProvider, if one is set."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        return
    several = getattr(provider, "_active_span_processor", None)
    processors = getattr(several, "_span_processors", ())
    if not any(isinstance(processor, LocalRootSpanProcessor) for processor in processors):
        provider.add_span_processor(LocalRootSpanProcessor())


class RootNames:
    """Names samples after local roots during one profiler run.

    For use by the profiler's thread only.

    Args:
        max_names: the maximum number of distinct names in a window; 0 disables local root names.
        baggage_keys: the keys of the baggage entries that become labels on the samples.

    Attributes:
        named: the number of samples that have a local root name.
        unnamed: the number of samples that have a link but no name, by reason: ``unknown_span``
            (the span started before the processor was added, was forgotten, or is not recording) or
            ``too_many_names``.
    """

    def __init__(
        self,
        roots: LocalRoots = process_roots,
        max_names: int = MAX_NAMES,
        baggage_keys: tuple[str, ...] = (),
    ) -> None:
        self._roots = roots
        self._baggage_keys = baggage_keys
        self._max_names = max_names
        self._seen: dict[SpanLink, LocalRoot] = {}
        self._seen_before: dict[SpanLink, LocalRoot] = {}
        self._rotated_s = time.monotonic()
        self.named = 0
        self.unnamed = {"unknown_span": 0, "too_many_names": 0}

    def start(self) -> None:
        """Start recording spans from the global TracerProvider, which may be set later."""
        self._roots.keep_ended = True
        self._roots.baggage_keys = self._baggage_keys
        watch_provider()

    def look(self, samples: Iterable[RawSample]) -> None:
        """Look up the spans linked from samples that have just been drained."""
        seen = self._seen
        for sample in samples:
            link = sample.link
            if link is not None and link not in seen:
                root = self._roots.find(
                    int.from_bytes(link.trace_id, "big"), int.from_bytes(link.span_id, "big")
                )
                if root is not None:
                    seen[link] = root
        self._roots.forget_ended()

    def name(self, window: Window) -> Window:
        """Returns the window with local root names added to its samples' links."""
        watch_provider()
        counts: Counter[SpanLink] = Counter()
        for _, sample in paced(window.samples):
            if sample.link is not None:
                counts[sample.link] += len(sample.timestamps_unix_ns)
        if not counts:
            return window
        named = self._choose(counts)
        roots = {link: self._find_root(link) for link in paced(counts)}
        labels = {link: root.labels for link, root in roots.items() if root and root.labels}
        window = window.change_samples(lambda sample: _describe(sample, named, labels), Pacer())
        # Forget spans that no sample has referred to for a while.
        now = time.monotonic()
        if now - self._rotated_s > _KEEP_S:
            self._rotated_s = now
            self._seen_before, self._seen = self._seen, {}
        return window

    def as_dict(self) -> dict[str, object]:
        """Returns the counts as plain values."""
        roots = self._roots
        return {
            "named": self.named,
            "unnamed": dict(self.unnamed),
            "spans": len(roots),
            "forgotten_spans": roots.forgotten,
            "failures": roots.failures,
        }

    def stop(self) -> None:
        """Stop keeping ended spans."""
        self._roots.stop_keeping()

    def _choose(self, counts: Counter[SpanLink]) -> dict[SpanLink, SpanLink]:
        """Adds root names to links, using only the ``max_names`` names with the most samples."""
        if not self._max_names:
            return {link: link for link in counts}
        names = {link: self._find_name(link) for link in paced(counts)}
        weights: Counter[str] = Counter()
        for link, count in paced(counts.items()):
            weights[names[link]] += count
        self.unnamed["unknown_span"] += weights.pop("", 0)
        kept = dict(weights.most_common(self._max_names))
        self.named += sum(kept.values())
        self.unnamed["too_many_names"] += weights.total() - sum(kept.values())
        return {
            link: link._replace(local_root=name) if name in kept else link
            for link, name in paced(names.items())
        }

    def _find_root(self, link: SpanLink) -> LocalRoot | None:
        return self._seen.get(link) or self._seen_before.get(link)

    def _find_name(self, link: SpanLink) -> str:
        root = self._find_root(link)
        if root is None:
            return ""
        try:
            return root.get_name()
        except Exception:  # noqa: BLE001 - counted; the sample has no name
            self._roots.failures += 1
            return ""


def _describe(
    sample: WindowSample, named: dict[SpanLink, SpanLink], labels: dict[SpanLink, LabelSet]
) -> WindowSample:
    """Adds a local root's name and labels to a sample, without overriding the sample's labels."""
    link = sample.link
    if link is None:
        return sample
    more = labels.get(link)
    if not more:
        return sample._replace(link=named[link])
    merged = tuple(sorted({**dict(more), **dict(sample.labels)}.items()))
    return sample._replace(link=named[link], labels=merged)
