"""How one thread writes its current span into its slot: the part that must be fast."""

from __future__ import annotations

import contextvars
import ctypes
from _ctypes import PyObj_FromPtr
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opentelemetry.context.context import Context
from opentelemetry.trace.propagation import _SPAN_KEY

from otel_kprofiler.bpf import SpanSlot

_LOW_HALF: Final = (1 << 64) - 1
_THREAD_STATE_WORDS: Final = 64
_SAMPLED: Final = 1


def get_thread_state() -> int:
    """Address of the interpreter's structure of this thread (``PyThreadState``)."""
    get = ctypes.pythonapi.PyThreadState_Get
    get.restype = ctypes.c_void_p
    address: int = get()
    return address


def find_context_offset() -> int | None:
    """Where ``PyThreadState`` has the current context; None if this is not CPython's way.

    Found out, because it differs between versions: the one word that holds the address of the
    context, whichever of two is entered.
    """
    state = (ctypes.c_uint64 * _THREAD_STATE_WORDS).from_address(get_thread_state())

    def holding(context: contextvars.Context) -> set[int]:
        return {index for index, word in enumerate(state) if word == id(context)}

    entered = [contextvars.copy_context() for _ in range(2)]
    found = [context.run(holding, context) for context in entered]
    places = found[0] & found[1]
    return 8 * places.pop() if len(places) == 1 else None


class SlotWriter(NamedTuple):
    """What a thread does with its slot; belongs to that thread.

    Attributes:
        publish: the span of an OpenTelemetry context is current in the context that the thread
            is in (or, with True, in the one that it is about to enter).
        enter: the thread is about to enter a context with this OpenTelemetry context.
        leave: it has left that context.
    """

    publish: Callable[..., None]
    enter: Callable[[contextvars.Context, Context | None], None]
    leave: Callable[[], None]


def make_slot_writer(  # noqa: PLR0915 - closures over one state
    slot: SpanSlot,
    context_at: int,
    *,
    unsampled: bool,
    moved: Callable[[], None],
    failed: Callable[[], None],
) -> SlotWriter:
    """The functions of one thread over its slot.

    They are closures, not methods, because that makes a change of span 0.1 µs cheaper. The slot
    is bound to the context whose span is in it, and keeps that context alive, so that no other
    one can have its address.

    Args:
        slot: the thread's own.
        context_at: address of the word of ``PyThreadState`` that says which context it is in.
        unsampled: publish spans, too, that are not sampled.
        moved: called when the thread turns out to have entered a context by itself.
        failed: called when a span cannot be read.
    """
    slot.bind(context_at, 0)
    key = _SPAN_KEY
    words = slot.words
    cell = memoryview((ctypes.c_uint64 * 1).from_address(context_at)).cast("B").cast("Q")
    bound = -1
    trace: object = None
    holds: object = None

    def publish(context: Context, entering: bool = False) -> None:
        nonlocal trace
        try:
            span: Any = context.get(key)
            if span is None:
                words[0] = 0
                return
            if cell[0] != bound and not entering:
                bind()
            try:
                span_context = span._context  # noqa: SLF001 - all of OpenTelemetry's have it
            except AttributeError:
                span_context = span.get_span_context()
            trace_id, span_id, remote, flags, _, _ = span_context
            if remote or not (flags & _SAMPLED or unsampled):
                span_id = 0
            if trace_id is not trace:
                # A new trace is written with the span id 0; of the same trace the span id
                # alone is written, as one machine word.
                words[0] = 0
                words[1] = trace_id >> 64
                words[2] = trace_id & _LOW_HALF
                trace = trace_id
            words[0] = span_id
        except Exception:  # noqa: BLE001 - counted; the service must not feel it
            words[0] = 0
            trace = None
            failed()

    def bind() -> None:
        nonlocal bound, holds
        words[0] = 0
        words[4] = bound = cell[0]
        holds = PyObj_FromPtr(bound) if bound else None
        moved()

    def enter(entered: contextvars.Context, context: Context | None) -> None:
        nonlocal bound, holds
        words[0] = 0
        holds = entered
        words[4] = bound = id(entered)
        if context:
            publish(context, True)

    def leave() -> None:
        nonlocal bound, holds
        words[0] = 0
        bound = -1
        holds = None

    return SlotWriter(publish, enter, leave)
