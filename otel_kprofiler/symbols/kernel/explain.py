"""Explains how an address was resolved: its names, its section, and the reason for the result."""

from collections.abc import Sequence
from typing import NamedTuple

from otel_kprofiler.model import Frame, Unresolved
from otel_kprofiler.symbols.kernel.hidden import HiddenCause
from otel_kprofiler.symbols.kernel.kallsyms import FreedSymbol


class Explanation(NamedTuple):
    """An explanation of an address, as shown to users.

    Attributes:
        frame: the frame that represents the address at the leaf of a stack.
        section: name of the executable range that contains the address; empty if no range does.
        names: all of the symbol's names, the displayed name first.
        start: runtime address of the symbol; 0 if there is no symbol.
        end: an upper bound on the symbol's end.
        freed: symbols that ftrace keeps for freed init functions at ``start`` or ``address``.
            Frames never show freed symbols.
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
    """Returns a clause that explains why an address resolved to ``frame``."""
    if frame.unresolved is Unresolved.HIDDEN and hidden is not None:
        return hidden.value
    if frame.unresolved is not None:
        return frame.unresolved.value
    if frame.offset < 0:
        return "the address is in the padding in front of the function"
    if freed:
        return "the live symbol that replaced a freed init function at this address"
    return "the nearest symbol at or below the address"
