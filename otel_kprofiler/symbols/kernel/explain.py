"""What is known of an address, and why its frame is as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from otel_kprofiler.model import Frame, Unresolved
from otel_kprofiler.symbols.kernel.hidden import HiddenCause
from otel_kprofiler.symbols.kernel.kallsyms import FreedSymbol


class Explanation(NamedTuple):
    """All that is known of an address, for people.

    Attributes:
        address: the address that was asked for.
        frame: what a leaf frame at the address shows.
        section: name of the executable range it lies in, empty if none.
        names: all names of the symbol, the shown one first.
        start: runtime address of the symbol, 0 without one.
        end: where the symbol ends, at the latest.
        freed: clones of freed init functions at the symbol or address; never shown in frames.
        reason: one sentence on why the frame is as it is.
    """

    address: int
    frame: Frame
    section: str
    names: tuple[str, ...]
    start: int
    end: int
    freed: tuple[FreedSymbol, ...]
    reason: str


def explain_frame(frame: Frame, hidden: HiddenCause | None, freed: Sequence[FreedSymbol]) -> str:
    """One sentence on why a frame is as it is."""
    if frame.unresolved is Unresolved.HIDDEN and hidden is not None:
        return hidden.value
    if frame.unresolved is not None:
        return frame.unresolved.value
    if frame.offset < 0:
        return "the address is in the padding in front of the function"
    if freed:
        return "a freed init function was at this address; the live symbol names it"
    return "the nearest symbol at or below the address"
