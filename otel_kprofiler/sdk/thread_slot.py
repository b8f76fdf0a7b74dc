"""How one thread writes its current span into its slot: the part that must be fast."""

from __future__ import annotations

import contextvars
import ctypes
from _ctypes import PyObj_FromPtr
from _thread import get_ident
from collections.abc import Callable, Mapping
from typing import Any, Final

from opentelemetry.context.context import Context
from opentelemetry.trace.propagation import _SPAN_KEY

from otel_kprofiler.bpf import SpanSlot

_THREAD_STATE_WORDS: Final = 64


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


class ThreadSlot:
    """What one thread writes its current span into; belongs to that thread.

    The slot is bound to the context whose span is in it, and keeps that context alive, so that no
    other one can have its address.

    Args:
        slot: the thread's own.
        context_at: address of the word of ``PyThreadState`` that says which context it is in.
        moved: called when the thread turns out to have entered a context by itself.

    Attributes:
        words: the slot.
        cell: the word at ``context_at``.
        bound: address of the context that the span is current in.
        trace: trace id that is in the slot, the same object.
    """

    __slots__ = ("_holds", "_moved", "bound", "cell", "trace", "words")

    def __init__(self, slot: SpanSlot, context_at: int, moved: Callable[[], None]) -> None:
        slot.bind(context_at, 0)
        self.words = slot.words
        word = (ctypes.c_uint64 * 1).from_address(context_at)
        self.cell = memoryview(word).cast("B").cast("Q")
        self.bound = -1
        self.trace: object = None
        self._holds: object = None
        self._moved = moved

    def bind(self) -> None:
        """The thread is in another context than the one that was bound."""
        self.words[0] = 0
        self.words[4] = self.bound = self.cell[0]
        self._holds = PyObj_FromPtr(self.bound) if self.bound else None
        self._moved()

    def enter(self, entered: contextvars.Context) -> None:
        """The thread is about to enter a context."""
        self.words[0] = 0
        self._holds = entered
        self.words[4] = self.bound = id(entered)

    def leave(self) -> None:
        """The thread has left a context."""
        self.words[0] = 0
        self.bound = -1
        self._holds = None


def make_publish(
    slots: Mapping[int, ThreadSlot], *, unsampled: bool, failed: Callable[[], None]
) -> Callable[..., bool]:
    """The function that each change of span runs.

    It writes the span of an OpenTelemetry context into the slot of this thread. Given a slot, it
    is that of this thread, which has just been told of the context that the thread is about to
    enter. It tells whether the thread has a slot.

    One function with everything in it, numbers too: what a change costs a service is code and
    data that are not in the processor's cache.

    Args:
        slots: by what ``threading.get_ident()`` says of the thread.
        unsampled: publish spans, too, that are not sampled.
        failed: called when a span cannot be read.
    """
    key, find, ident = _SPAN_KEY, slots.get, get_ident

    def publish(context: Context, entering: ThreadSlot | None = None) -> bool:
        slot = entering or find(ident())
        if slot is None:
            return False
        words = slot.words
        try:
            span: Any = context.get(key)
            if span is None:
                words[0] = 0
                return True
            if slot.cell[0] != slot.bound and entering is None:
                slot.bind()
            try:
                span_context = span._context  # noqa: SLF001 - all of OpenTelemetry's have it
            except AttributeError:
                span_context = span.get_span_context()
            trace_id, span_id, remote, flags, _, _ = span_context
            if remote or not (flags & 0x01 or unsampled):  # sampled
                span_id = 0
            if trace_id is not slot.trace:
                # A new trace is written with the span id 0; of the same trace the span id
                # alone is written, as one machine word.
                words[0] = 0
                words[1] = trace_id >> 64
                words[2] = trace_id & 0xFFFF_FFFF_FFFF_FFFF
                slot.trace = trace_id
            words[0] = span_id
        except Exception:  # noqa: BLE001 - counted; the service must not feel it
            words[0] = 0
            slot.trace = None
            failed()
        return True

    return publish
