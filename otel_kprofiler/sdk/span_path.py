"""Finds and verifies the path from a thread to its current span through this interpreter's objects.

The sampler follows the path each time it takes a sample, so the interpreter needs no hooks. Before
the path is used, :class:`.span_reader.SpanReader` must find the same spans as the interpreter, in
contexts, dictionaries and spans of every expected form.
"""

import contextvars
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry.context.context import Context
from opentelemetry.context.contextvars_context import ContextVarsRuntimeContext
from opentelemetry.sdk import trace as sdk_trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags
from opentelemetry.trace.propagation import _SPAN_KEY

from otel_kprofiler.bpf import VALUES_BY_POINTER, VALUES_INLINE, VALUES_TAGGED, SpanClass, SpanPath
from otel_kprofiler.errors import describe_error
from otel_kprofiler.sdk.label_sets import KEY as LABELS_KEY
from otel_kprofiler.sdk.object_layout import find_context_offset, get_thread_state
from otel_kprofiler.sdk.span_reader import (
    MAX_THREADS,
    Read,
    SpanReader,
    find_values,
    read_dict,
    read_own_memory,
    read_word,
)
from otel_kprofiler.sdk.thread_states import find_tid_offset

_STYLES: Final = {
    (3, 11): VALUES_BY_POINTER,
    (3, 12): VALUES_TAGGED,
    (3, 13): VALUES_INLINE,
    (3, 14): VALUES_INLINE,
}
"""Storage styles for instance attributes, by supported CPython version."""
_NODES: Final = frozenset({"hamt", "hamt_bitmap_node", "hamt_array_node", "hamt_collision_node"})
_ATTRIBUTE: Final = sys.intern("_context")
_FOLLOWED: Final = (NonRecordingSpan, sdk_trace.Span, getattr(sdk_trace, "_Span", NonRecordingSpan))
"""The span classes of the API and the SDK. The SDK's tracers create instances of the last class."""
_MAX_ATTRIBUTES: Final = 30
"""SHARED_KEYS_MAX_SIZE in Objects/dictobject.c: the maximum number of shared attribute names."""
_OLDER_AT: Final = 8
_WORD: Final = (1 << 64) - 1
_OTHER_VARIABLES: Final = (0, 1, 7, 20, 300)
_OTHER_KEYS: Final = (0, 3, 12, 70, 500)
_TRIES: Final = 20


class UnprovenError(Exception):
    """Raised if the path cannot be followed in this interpreter. The message states the reason."""


def find_span_path(read: Read = read_own_memory) -> SpanPath:
    """Returns the verified path; raises ``UnprovenError`` if objects have an unexpected layout."""
    style = _STYLES.get(sys.version_info[:2])
    if sys.implementation.name != "cpython" or style is None:
        raise UnprovenError("the layout of this interpreter's objects is unknown")
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise UnprovenError(
            "this Python runs without the GIL, so objects may change while being read"
        )
    runtime: Any = otel_context._RUNTIME_CONTEXT  # noqa: SLF001
    if type(runtime) is not ContextVarsRuntimeContext:
        kind = f"{type(runtime).__module__}.{type(runtime).__qualname__}"
        raise UnprovenError(f"the runtime context is {kind} instead of ContextVarsRuntimeContext")
    variable: ContextVar[Context] = runtime._current_context  # noqa: SLF001
    tid_at, context_at = find_tid_offset(), find_context_offset()
    nodes = {node.__name__: id(node) for node in object.__subclasses__()}
    if tid_at is None or context_at is None or not nodes.keys() >= _NODES:
        raise UnprovenError("thread states or contexts are not laid out as in CPython")
    try:
        path = SpanPath(
            tgid=os.getpid(),
            oldest_thread=_find_oldest(read),
            tid_at=tid_at,
            context_at=context_at,
            context_type=id(contextvars.Context),
            hamt_type=nodes["hamt"],
            bitmap_type=nodes["hamt_bitmap_node"],
            array_type=nodes["hamt_array_node"],
            collision_type=nodes["hamt_collision_node"],
            variable=id(variable),
            variable_hash=_hash_in_hamt(variable),
            otel_context_type=id(Context),
            span_key=id(_SPAN_KEY),
            span_key_hash=hash(_SPAN_KEY) & _WORD,
            labels_key=id(LABELS_KEY),
            labels_key_hash=hash(LABELS_KEY) & _WORD,
            dict_type=id(dict),
            attribute=id(_ATTRIBUTE),
            attribute_hash=hash(_ATTRIBUTE) & _WORD,
            values_style=style,
            classes=tuple(_find_class(read, style, spans) for spans in _make_spans()),
        )
        _prove(SpanReader(path, read), variable)
    except OSError as error:
        raise UnprovenError(
            f"this process's memory cannot be read: {describe_error(error)}"
        ) from error
    return path


def find_other_classes() -> frozenset[str]:
    """Returns the names of span classes whose layout is not supported, such as span wrappers."""
    names, waiting = set(), [Span]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            if kind not in _FOLLOWED and not inspect.isabstract(kind):
                names.add(f"{kind.__module__}.{kind.__qualname__}")
    return frozenset(names)


def _find_oldest(read: Read) -> int:
    """Returns the last thread state in the list, which is the oldest."""
    state = get_thread_state()
    for _ in range(MAX_THREADS):
        older = read_word(read, state + _OLDER_AT)
        if not older:
            return state
        state = older
    raise UnprovenError("this process has too many threads")


def _hash_in_hamt(key: object) -> int:
    """Returns the unsigned result of ``hamt_hash`` (Python/hamt.c) for a key."""
    whole = hash(key) & _WORD
    half = whole >> 32 ^ whole & 0xFFFF_FFFF
    return 0xFFFF_FFFE if half == 0xFFFF_FFFF else half


def _make_spans() -> Iterator[list[Any]]:
    """Yields, for each supported class, a list of spans that store attributes in different ways."""

    def make_context(number: int) -> SpanContext:
        return SpanContext(number, number, is_remote=False, trace_flags=TraceFlags(1))

    recording = getattr(sdk_trace, "_Span", None)  # the class of the spans that tracers create
    if recording is None:
        raise UnprovenError("the OpenTelemetry SDK lacks the class _Span")
    # without an explicit resource, the SDK would run its resource detectors
    nothing = Resource.get_empty()
    for make in (NonRecordingSpan, lambda context: recording("", context, resource=nothing)):
        spans: list[Any] = [make(make_context(number)) for number in (1, 2, 3)]
        vars(spans[1])  # creates a key-sharing dictionary
        spans[2].__dict__ = dict(vars(spans[2]))  # a dictionary with unshared keys
        yield spans


def _find_class(read: Read, style: int, spans: list[Any]) -> SpanClass:
    values, head, _ = find_values(read, style, id(spans[0]))
    wanted = id(spans[0].get_span_context())
    places = []
    for place in range(_MAX_ATTRIBUTES if values else 0):
        try:
            word = read_word(read, values + head + 8 * place)
        except OSError:
            break  # beyond the last attribute
        if word == wanted:
            places.append(place)
    _, keys, split = read_dict(read, id(vars(spans[1])))
    if len(places) != 1 or not split:
        raise UnprovenError(
            f"the attributes of {type(spans[0]).__qualname__} have an unexpected memory layout"
        )
    return SpanClass(id(type(spans[0])), places[0], keys)


def _prove(reader: SpanReader, variable: ContextVar[Context]) -> None:
    """Check that the values read from memory match Python's, for every form of each object.

    Threads that start or exit between two reads change the list of thread states, so each
    comparison is repeated. The path is rejected only if every comparison fails.
    """
    tid = threading.get_native_id()
    if all(reader.find_thread_state(tid) != get_thread_state() for _ in range(_TRIES)):
        raise UnprovenError("the list of thread states is not laid out as in CPython")

    def differs() -> bool:
        span: Any = variable.get().get(_SPAN_KEY)
        context = None if span is None else span.get_span_context()
        expected = [
            0 if value is None else id(value) for value in (context, variable.get().get(LABELS_KEY))
        ]
        return [reader.find_span_context(tid), reader.find_labels(tid)] != expected

    def enter(others: list[ContextVar[int]], current: Context | None) -> bool:
        for other in others:
            other.set(0)
        if current is not None:
            variable.set(current)
        return all(differs() for _ in range(_TRIES))

    spans: list[Any] = [span for of_class in _make_spans() for span in of_class]
    others = [ContextVar[int](f"{number}") for number in range(max(_OTHER_VARIABLES))]
    cases = [(count, current) for count in _OTHER_VARIABLES for current in (None, _hold(spans[0]))]
    cases += [(1, current) for current in _make_contexts(spans)]
    for count, current in cases:
        if contextvars.Context().run(enter, others[:count], current):
            raise UnprovenError("the span found in memory differs from the current span")


def _hold(span: Any) -> Context:
    return Context({_SPAN_KEY: span})


def _make_contexts(spans: list[Any]) -> Iterator[Context]:
    """Yields OpenTelemetry contexts of all sizes and key types, with and without a span."""
    for span in spans:
        yield _hold(span)
    for size in _OTHER_KEYS:
        text: dict[Any, Any] = {f"{number}": number for number in range(size)}
        number: dict[Any, Any] = {number: number for number in range(size)}
        for others in (text, number):
            yield Context(others)
            yield Context({**others, _SPAN_KEY: spans[0]})
            yield Context({_SPAN_KEY: spans[0], **others})
            yield Context({**others, LABELS_KEY: size, _SPAN_KEY: spans[0]})
            yield Context({LABELS_KEY: size, **others})
