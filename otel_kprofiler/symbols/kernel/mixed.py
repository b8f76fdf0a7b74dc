"""Stacks with frames in BPF programs and other code outside modules."""

from __future__ import annotations

from dataclasses import replace

from otel_kprofiler.model import Frame, FrameKind, Stack
from otel_kprofiler.symbols.kernel.bpf import KsymbolTable, LoadedKsymbol
from otel_kprofiler.symbols.kernel.explain import Explanation


class MixedStack:
    """A stack with addresses outside vmlinux and modules, resolved for each time.

    Args:
        stack: the stack as resolved by vmlinux and modules.
        table: symbols of the other addresses.
    """

    __slots__ = ("_last", "_places", "_stack", "_table")

    def __init__(self, stack: Stack, table: KsymbolTable) -> None:
        self._stack = stack
        self._table = table
        self._places = tuple(
            index for index, frame in enumerate(stack.leading) if is_outside(frame)
        )
        self._last: tuple[Stack, tuple[LoadedKsymbol | None, ...]] = (
            stack,
            (None,) * len(self._places),
        )

    def at(self, time_ns: int) -> Stack:
        """The stack at a boot time; the same object while the same code is loaded."""
        whole, (stack, before) = self._stack, self._last
        frames = whole.leading
        found = tuple(
            code
            if code is not None and code.covers(frames[place].address, time_ns)
            else self._table.lookup(frames[place].address, time_ns)
            for place, code in zip(self._places, before, strict=True)
        )
        if found != before:
            mixed = list(frames)
            for place, code in zip(self._places, found, strict=True):
                if code is not None:
                    mixed[place] = code.frame(frames[place].address)
            stack = replace(whole, leading=tuple(mixed))
            self._last = stack, found
        return stack


def explain_ksymbol(code: LoadedKsymbol, address: int) -> Explanation:
    """Explain an address in code outside modules."""
    symbol, frame = code.symbol, code.frame(address)
    if frame.unresolved is not None:
        return Explanation(address, frame, "", (), 0, 0, (), frame.unresolved.value)
    reason = "the kernel reported its extent"
    if not symbol.length:
        reason = "the nearest symbol below the address; the kernel reported no length"
    return Explanation(address, frame, "", (symbol.name,), symbol.start, code.end, (), reason)


def is_outside(frame: Frame) -> bool:
    """Whether a kernel frame is in no known module, so that its code may come and go."""
    return frame.module is None and frame.kind is not FrameKind.USER
