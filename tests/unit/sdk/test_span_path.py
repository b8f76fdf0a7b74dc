"""A chain of pointers in the interpreter's memory leads to the thread's current span."""

import asyncio
import contextvars
import random
import sys
import threading

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.context.contextvars_context import ContextVarsRuntimeContext
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.trace.propagation import _SPAN_KEY

from otel_kprofiler.bpf import VALUES_INLINE
from otel_kprofiler.sdk import span_path
from otel_kprofiler.sdk.span_path import UnprovenError, find_span_path
from otel_kprofiler.sdk.span_reader import SpanReader, read_own_memory
from tests.raising import raising

TRACER = TracerProvider().get_tracer("test")
VARIABLE = otel_context._RUNTIME_CONTEXT._current_context


@pytest.fixture(scope="module")
def path():
    return find_span_path()


def found(path):
    return SpanReader(path).find_span_context(threading.get_native_id())


def said():
    span = otel_context.get_value(_SPAN_KEY)
    return 0 if span is None else id(span.get_span_context())


@pytest.mark.system
def test_spans_in_nested_contexts_threads_and_tasks_are_found(path):
    wrong = []

    def check():
        if found(path) != said():
            wrong.append(trace.get_current_span())

    async def nest(depth):
        with TRACER.start_as_current_span("n"):
            check()
            await asyncio.sleep(0)
            if depth:
                await asyncio.gather(nest(depth - 1), nest(depth - 1), asyncio.to_thread(check))
            check()

    check()
    with TRACER.start_as_current_span("outer"):
        check()
        asyncio.run(nest(3))
        thread = threading.Thread(target=check)
        thread.start()
        thread.join()
        copied = contextvars.copy_context()
    copied.run(check)
    with TracerProvider(sampler=ALWAYS_OFF).get_tracer("x").start_as_current_span("unsampled"):
        check()
    check()
    assert wrong == []


def test_spans_are_found_in_context_maps_with_any_structure(path):
    chance = random.Random(7)
    variables = [contextvars.ContextVar(f"v{number}") for number in range(2000)]
    span = NonRecordingSpan(SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1)))

    def check():
        others = chance.sample(variables, chance.choice((0, 2, 9, 60, 2000)))
        tokens = [(each, each.set(1)) for each in others]
        numbers = range(chance.choice((0, 2, 9, 200, 3000)))
        items = [(chance.choice((f"k{number}", number)), 0) for number in numbers]
        if chance.random() < 0.8:
            items.append((_SPAN_KEY, span))
        chance.shuffle(items)
        VARIABLE.set(Context(items))
        for each, token in chance.sample(tokens, len(tokens) // 2):
            each.reset(token)
        return found(path), said()

    pairs = [contextvars.Context().run(check) for _ in range(150)]
    assert [read for read, _ in pairs] == [expected for _, expected in pairs]
    assert {expected for _, expected in pairs} == {0, id(span.get_span_context())}


class Named(str):
    """A context variable name with a chosen hash."""

    __slots__ = ("value",)

    def __hash__(self):
        return self.value


def make_equal(key):
    """Creates a context variable with the same hash as a given variable."""
    for _ in range(1000):
        name = Named("equal")
        name.value = 0
        name.value = hash(contextvars.ContextVar(name)) ^ hash(key)
        equal = contextvars.ContextVar(name)  # often allocated at the same address
        if hash(equal) == hash(key):
            return equal
    pytest.skip("no new variable has the address of a deleted variable")


@pytest.mark.parametrize("others", [0, 40])
def test_context_variables_with_equal_hashes_are_distinguished(path, others):
    equal = make_equal(VARIABLE)
    filling = [contextvars.ContextVar(str(number)) for number in range(others)]

    def check():
        for each in filling:
            each.set(1)
        equal.set(Context({_SPAN_KEY: trace.INVALID_SPAN}))
        before = found(path), said()
        with TRACER.start_as_current_span("x"):
            return before, (found(path), said())

    before, after = contextvars.Context().run(check)
    assert before == (0, 0)
    assert after[0] == after[1] != 0


def test_attributes_are_read_wherever_an_instance_stores_them(path):
    for change in (
        lambda _: None,
        vars,
        lambda span: setattr(span, "added", 1),
        lambda span: vars(span).update({f"added_{n}": n for n in range(300)}),
        lambda span: vars(span).pop("_context") and None,
    ):
        with TRACER.start_as_current_span("x") as span:
            expected = id(span._context)
            change(span)
            assert found(path) == (expected if hasattr(span, "_context") else 0)
            span._context = trace.INVALID_SPAN_CONTEXT


class Stranger(NonRecordingSpan):
    """A span of an unknown class."""


def test_unknown_span_classes_yield_no_span(path):
    for odd in (Stranger(trace.INVALID_SPAN_CONTEXT), "text", 5, None, object(), Stranger):
        token = otel_context.attach(Context({_SPAN_KEY: odd}))
        assert found(path) == 0
        otel_context.detach(token)
    for odd in ({_SPAN_KEY: trace.INVALID_SPAN}, None, 1):
        token = VARIABLE.set(odd)
        assert found(path) == 0
        VARIABLE.reset(token)


def test_threads_without_a_python_thread_state_have_no_span(path):
    with TRACER.start_as_current_span("x"):
        assert SpanReader(path).find_span_context(1) == 0


def test_no_span_is_found_if_any_read_accesses_unmapped_memory(path):
    def read(address, size):
        nonlocal left
        left -= 1
        return read_own_memory(address if left else 8, size)

    with TRACER.start_as_current_span("x"):
        for reads in range(1, 200):
            left = reads
            result = SpanReader(path, read).find_span_context(threading.get_native_id())
            if left > 0:
                break
            assert result == 0
        assert result == said() != 0


def other_paths(path):
    """Yields copies of the path, each with one wrong field that verification must detect."""
    unused = {"tgid", "classes"}  # tgid is only compared with the kernel's ids
    unused.add("collision_type")  # hashes do not collide here
    for field in [name for name in path._fields if name not in unused]:
        for flip in (1, 8):
            yield path._replace(**{field: getattr(path, field) ^ flip})
    for number, known in enumerate(path.classes):
        for part in ("type", "place") if path.values_style == VALUES_INLINE else known._fields:
            classes = list(path.classes)
            classes[number] = known._replace(**{part: getattr(known, part) ^ 1})
            yield path._replace(classes=tuple(classes))


def test_verification_rejects_every_wrong_span_path(path):
    span_path._prove(SpanReader(path), VARIABLE)
    for other in other_paths(path):
        if other.values_style > VALUES_INLINE:  # higher values are treated like VALUES_INLINE
            continue
        with pytest.raises((UnprovenError, OSError)):
            span_path._prove(SpanReader(other), VARIABLE)


def test_a_span_path_that_cannot_be_verified_is_rejected(monkeypatch):
    with pytest.raises(UnprovenError, match="Operation not permitted"):
        find_span_path(raising(OSError(1, "Operation not permitted")))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
        with pytest.raises(UnprovenError, match="without the GIL"):
            find_span_path()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "version_info", (3, 99, 0))
        with pytest.raises(UnprovenError, match="is unknown"):
            find_span_path()

    class Other(ContextVarsRuntimeContext):
        """Any runtime context other than OpenTelemetry's."""

    monkeypatch.setattr(otel_context, "_RUNTIME_CONTEXT", Other())
    with pytest.raises(UnprovenError, match="Other"):
        find_span_path()
