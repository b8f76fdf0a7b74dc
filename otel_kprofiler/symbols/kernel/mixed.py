"""Resolves kernel stacks that contain frames in BPF programs or in other code outside modules."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from otel_kprofiler.model import KERNEL_SIDE, Frame, RawSample, Side, StackStatus, Unresolved
from otel_kprofiler.symbols.kernel.bpf import KsymbolTable, LoadedKsymbol
from otel_kprofiler.symbols.kernel.explain import Explanation

_MAY_BE_KNOWN_LATER: Final = frozenset(
    {Unresolved.NOT_YET_KNOWN, Unresolved.UNMAPPED, Unresolved.RECORDS_LOST}
)
_UNRESOLVED: Final = attrgetter("unresolved")


def make_kernel_side(frames: Sequence[Frame], status: StackStatus) -> Side:
    """Builds the kernel part of a stack, marked provisional if a frame may be resolved later."""
    is_provisional = not _MAY_BE_KNOWN_LATER.isdisjoint(map(_UNRESOLVED, frames))
    return Side(KERNEL_SIDE, tuple(frames), status, is_provisional)


class MixedSide:
    """The kernel part of a stack with addresses outside vmlinux and modules.

    Addresses in vmlinux and modules are already resolved in ``side``. All other addresses are
    resolved by ``table``.
    """

    __slots__ = ("_last", "_places", "_side", "_table")

    def __init__(self, side: Side, table: KsymbolTable) -> None:
        self._side = side
        self._table = table
        self._places = tuple(index for index, frame in enumerate(side.frames) if is_outside(frame))
        self._last: tuple[Side, tuple[LoadedKsymbol | None, ...]] = (
            side,
            (None,) * len(self._places),
        )

    def at(self, time_ns: int) -> Side:
        """Returns the kernel frames as of ``time_ns``; the same object if no frame has changed."""
        whole, (side, old_codes) = self._side, self._last
        frames = whole.frames
        codes = tuple(
            code
            if code is not None and code.covers(frames[place].address, time_ns)
            else self._table.lookup(frames[place].address, time_ns)
            for place, code in zip(self._places, old_codes, strict=True)
        )
        if codes != old_codes:
            mixed = list(frames)
            for place, code in zip(self._places, codes, strict=True):
                if code is not None:
                    mixed[place] = code.frame(frames[place].address)
            side = make_kernel_side(mixed, whole.status)
            self._last = side, codes
        return side

    def of(self, sample: RawSample) -> Side:
        """Returns the kernel frames as of a sample's timestamp."""
        return self.at(sample.time_ns)


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
    """Returns whether a kernel frame is outside modules."""
    return frame.module is None
