"""Determines field offsets in CPython objects by searching objects with known content."""

import contextvars
import ctypes
import sys
from typing import Final

from opentelemetry.trace import SpanContext, TraceFlags

from otel_kprofiler.bpf import SpanLayout

THREAD_STATE_WORDS: Final = 64
_DIGIT_BITS: Final = 30
_DIGITS: Final = (1, 2, 3, 4, 5)


def get_thread_state() -> int:
    """Returns the address of this thread's ``PyThreadState``."""
    get = ctypes.pythonapi.PyThreadState_Get
    get.restype = ctypes.c_void_p
    address: int = get()
    return address


def find_context_offset() -> int | None:
    """Returns the offset of the current context in ``PyThreadState``; None if unknown.

    Enters two contexts one after the other, and searches the thread state for the word that
    contains the address of the current context.
    """
    state = (ctypes.c_uint64 * THREAD_STATE_WORDS).from_address(get_thread_state())

    def holding(context: contextvars.Context) -> set[int]:
        return {index for index, word in enumerate(state) if word == id(context)}

    entered = [contextvars.copy_context() for _ in range(2)]
    places_in_contexts = [context.run(holding, context) for context in entered]
    places = places_in_contexts[0] & places_in_contexts[1]
    return 8 * places.pop() if len(places) == 1 else None


def find_entered_offset() -> int | None:
    """Returns the offset of the ``int`` that is 1 in entered contexts; None if not found."""
    context = contextvars.Context()
    flags = (ctypes.c_int32 * (context.__sizeof__() // 4)).from_address(id(context))
    left = list(flags)
    places = [at for at, flag in enumerate(context.run(list, flags)) if (left[at], flag) == (0, 1)]
    return 4 * places[0] if len(places) == 1 else None


def find_span_layout(*, unsampled: bool) -> SpanLayout | None:
    """Returns the layout of this interpreter's span contexts; None if it is not supported."""
    number = sum(digit << _DIGIT_BITS * place for place, digit in enumerate(_DIGITS))
    flags = TraceFlags(TraceFlags.SAMPLED)
    span_context = SpanContext(number, number >> 64, is_remote=False, trace_flags=flags)
    entries = span_context.trace_id, span_context.span_id, False, flags
    items_at = _find_references(span_context, entries)
    size_bits = _find_size_bits(number)
    if items_at is None or size_bits is None:
        return None
    size_shift, negative_bit = size_bits
    return SpanLayout(
        span_context_type=id(SpanContext),
        int_type=id(int),
        flags_type=id(TraceFlags),
        false_at=id(False),
        items_at=items_at,
        size_shift=size_shift,
        negative_bit=negative_bit,
        unsampled=int(unsampled),
    )


def _find_references(holder: object, held: tuple[object, ...]) -> int | None:
    """Returns the byte offset at which ``holder`` refers to ``held``; None if not unique."""
    words = list((ctypes.c_uint64 * (holder.__sizeof__() // 8)).from_address(id(holder)))
    wanted = [id(each) for each in held]
    matches = [at for at in range(len(words)) if words[at : at + len(wanted)] == wanted]
    return 8 * matches[0] if len(matches) == 1 else None


def _find_size_bits(number: int) -> tuple[int, int] | None:
    """Derives ``size_shift`` and ``negative_bit`` from the size field of an integer."""
    if sys.int_info.bits_per_digit != _DIGIT_BITS or number.__sizeof__() != 24 + 4 * len(_DIGITS):
        return None
    _, type_, size = (ctypes.c_uint64 * 3).from_address(id(number))
    digits = (ctypes.c_uint32 * len(_DIGITS)).from_address(id(number) + 24)
    if type_ != id(int) or tuple(digits) != _DIGITS:
        return None
    # Up to CPython 3.11, this is ob_size: the number of digits, negated if the integer is negative.
    # Since 3.12, it is lv_tag, whose low 3 bits are flags.
    return {len(_DIGITS): (0, 0), len(_DIGITS) << 3: (3, 2)}.get(size)
