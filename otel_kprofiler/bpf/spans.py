"""Defines the memory layout of span contexts, which the sampler reads in the interrupt."""

from typing import NamedTuple


class SpanLayout(NamedTuple):
    """Memory layout of span contexts in this interpreter (``struct span_layout``).

    The sampler identifies types by address, and does not read objects of unknown types. Offsets are
    in bytes from the start of an object, which begins with its reference count and its type. In an
    integer, these fields are followed by a word with the digit count and the 30-bit digits.

    Attributes:
        span_context_type: type of span contexts. Span contexts are tuples that begin with the trace
            id, the span id, whether the span is remote, and the trace flags.
        int_type: type of trace ids and span ids.
        flags_type: type of the trace flags; its instances have the layout of ``int``.
        false_at: address of ``False``.
        items_at: offset of the first item in a span context.
        size_shift: position of the digit count in its word; the lower bits are flags.
        negative_bit: mask of the flag bit that marks negative integers; 0 if a negative number of
            digits marks them.
        unsampled: 1 to also read unsampled spans; 0 to skip them.
    """

    span_context_type: int
    int_type: int
    flags_type: int
    false_at: int
    items_at: int
    size_shift: int
    negative_bit: int
    unsampled: int
