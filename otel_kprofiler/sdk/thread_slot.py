"""Thread slots: a thread's active span, and the function that stores a new span.

A slot refers to two interpreter objects, which the sampler reads.
"""

from __future__ import annotations

import contextvars
import ctypes
import sys
from _thread import get_ident
from collections.abc import Callable, Mapping
from typing import Any, Final

from opentelemetry.context.context import Context
from opentelemetry.sdk import trace as sdk_trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.trace.propagation import _SPAN_KEY

from otel_kprofiler.bpf import SpanLayout

THREAD_STATE_WORDS: Final = 64
_DIGIT_BITS: Final = 30
_DIGITS: Final = (1, 2, 3, 4, 5)
_WITH_CONTEXT: Final = frozenset({NonRecordingSpan, getattr(sdk_trace, "_Span", NonRecordingSpan)})
"""Classes whose ``_context`` is the span context; reading the attribute is faster."""

_probe: contextvars.ContextVar[None] = contextvars.ContextVar("otel_kprofiler.probe")


class ThreadSlot:
    """The active span of a thread, written by that thread only.

    A slot keeps the referenced objects alive, so that their addresses are not reused.

    Attributes:
        owner: the context in which the span is active, or a token created in it.
        span_context: the span's context; None if there is no span, and while ``owner`` changes.
        variables: the owner's mapping of variables at that time. Each change replaces the mapping,
            which reveals changes by code that is not hooked, such as asgiref, which sets
            OpenTelemetry's variable directly.
        look: requests a call of ``look`` at the next change; may be set from any thread.
    """

    __slots__ = ("look", "owner", "span_context", "variables")

    def __init__(self) -> None:
        self.owner: object = None
        self.span_context: object = None
        self.variables: object = None
        self.look = True


def get_token() -> contextvars.Token[None]:
    """Returns a token created in this thread's current context."""
    token = _probe.set(None)
    _probe.reset(token)
    return token


def get_thread_state() -> int:
    """Returns the address of this thread's ``PyThreadState``."""
    get = ctypes.pythonapi.PyThreadState_Get
    get.restype = ctypes.c_void_p
    address: int = get()
    return address


def find_context_offset() -> int | None:
    """Returns the offset of the current context in ``PyThreadState``; None if not found.

    It differs between versions, so it is searched for: the only word that holds the current
    context's address in two different contexts.
    """
    state = (ctypes.c_uint64 * THREAD_STATE_WORDS).from_address(get_thread_state())

    def holding(context: contextvars.Context) -> set[int]:
        return {index for index, word in enumerate(state) if word == id(context)}

    entered = [contextvars.copy_context() for _ in range(2)]
    places_in_contexts = [context.run(holding, context) for context in entered]
    places = places_in_contexts[0] & places_in_contexts[1]
    return 8 * places.pop() if len(places) == 1 else None


def find_entered_offset() -> int | None:
    """Returns the offset of a context's ``int`` that is 1 while entered; None if not found."""
    context = contextvars.Context()
    flags = (ctypes.c_int32 * (context.__sizeof__() // 4)).from_address(id(context))
    left = list(flags)
    places = [at for at, flag in enumerate(context.run(list, flags)) if (left[at], flag) == (0, 1)]
    return 4 * places[0] if len(places) == 1 else None


def find_owner_offset() -> int | None:
    """Returns the offset in a :class:`ThreadSlot` of its three references; None if not found."""
    slot = ThreadSlot()
    slot.owner, slot.span_context, slot.variables = object(), object(), object()
    return _find_references(slot, (slot.owner, slot.span_context, slot.variables))


def find_variables_offset() -> int | None:
    """Returns the offset of a context's mapping of variables, which each change replaces."""
    context = contextvars.Context()
    words = (ctypes.c_uint64 * (context.__sizeof__() // 8)).from_address(id(context))
    old_words = list(words)
    context.run(_probe.set, None)
    changed = [at for at, word in enumerate(words) if word != old_words[at]]
    return 8 * changed[0] if len(changed) == 1 and words[changed[0]] else None


def make_get_variables() -> Callable[[object], object] | None:
    """Make the function that returns an owner's mapping of variables; None if not found."""
    context = contextvars.copy_context()
    token_context_at = _find_references(context.run(get_token), (context,))
    variables_at = find_variables_offset()
    if token_context_at is None or variables_at is None:
        return None
    at, in_token, token_type = variables_at, token_context_at, contextvars.Token
    read = ctypes.py_object.from_address

    def get_variables(owner: object) -> object:
        if type(owner) is token_type:
            owner = read(id(owner) + in_token).value
        return read(id(owner) + at).value

    return get_variables


def find_span_layout(*, unsampled: bool) -> SpanLayout | None:
    """Returns the memory layout of this interpreter's span contexts; None if it is not as expected.

    Searches for offsets in objects with known content.

    Args:
        unsampled: whether to include spans that are not sampled.
    """
    number = sum(digit << _DIGIT_BITS * place for place, digit in enumerate(_DIGITS))
    flags = TraceFlags(TraceFlags.SAMPLED)
    span_context = SpanContext(number, number >> 64, is_remote=False, trace_flags=flags)
    entries = span_context.trace_id, span_context.span_id, False, flags
    items_at = _find_references(span_context, entries)
    variables_at = find_variables_offset()
    context = contextvars.copy_context()
    token_context_at = _find_references(context.run(get_token), (context,))
    size_bits = _find_size_bits(number)
    if items_at is None or token_context_at is None or variables_at is None or size_bits is None:
        return None
    size_shift, negative_bit = size_bits
    return SpanLayout(
        span_context_type=id(SpanContext),
        token_type=id(contextvars.Token),
        int_type=id(int),
        flags_type=id(TraceFlags),
        false_at=id(False),
        items_at=items_at,
        token_context_at=token_context_at,
        variables_at=variables_at,
        size_shift=size_shift,
        negative_bit=negative_bit,
        unsampled=int(unsampled),
    )


def _find_references(holder: object, held: tuple[object, ...]) -> int | None:
    """Returns the offset of consecutive references in an object; None if not unique."""
    words = list((ctypes.c_uint64 * (holder.__sizeof__() // 8)).from_address(id(holder)))
    wanted = [id(each) for each in held]
    matches = [at for at in range(len(words)) if words[at : at + len(wanted)] == wanted]
    return 8 * matches[0] if len(matches) == 1 else None


def _find_size_bits(number: int) -> tuple[int, int] | None:
    """Returns the layout's ``size_shift`` and ``negative_bit``, from an integer's known digits."""
    if sys.int_info.bits_per_digit != _DIGIT_BITS or number.__sizeof__() != 24 + 4 * len(_DIGITS):
        return None
    _, type_, size = (ctypes.c_uint64 * 3).from_address(id(number))
    digits = (ctypes.c_uint32 * len(_DIGITS)).from_address(id(number) + 24)
    if type_ != id(int) or tuple(digits) != _DIGITS:
        return None
    # Up to 3.11 the word is the number of digits with the integer's sign; later versions have
    # flags in the low 3 bits.
    return {len(_DIGITS): (0, 0), len(_DIGITS) << 3: (3, 2)}.get(size)


def make_publish(
    slots: Mapping[int, ThreadSlot],
    get_variables: Callable[[object], object],
    *,
    look: Callable[[], None],
    failed: Callable[[], None],
) -> Callable[[Context, object], bool]:
    """Make the function that publishes each change of span.

    That function publishes an OpenTelemetry context's span and its owner in this thread's slot, and
    returns whether the thread has a slot. It is a single function because cache misses dominate the
    cost of a change.

    Args:
        slots: slots by ``threading.get_ident()``.
        get_variables: returns an owner's mapping of variables.
        look: called when a slot requests it.
        failed: called when a span cannot be read.
    """
    key, find, ident = _SPAN_KEY, slots.get, get_ident

    def publish(context: Context, owner: object) -> bool:
        slot = find(ident())
        if slot is None:
            return False
        try:
            span: Any = context.get(key)
            slot.span_context = None
            slot.owner = owner
            slot.variables = get_variables(owner)
            if span is not None:
                if type(span) in _WITH_CONTEXT:
                    slot.span_context = span._context  # noqa: SLF001
                else:
                    slot.span_context = span.get_span_context()
            if slot.look:
                slot.look = False
                look()
        except Exception:  # noqa: BLE001 - counted; the service must not be affected
            slot.span_context = None
            failed()
        return True

    return publish
