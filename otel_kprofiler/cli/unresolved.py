"""Reports the percentages of unnamed kernel and user frames, and the file affected most."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from otel_kprofiler.model import KERNEL_SIDE, SIDES, USER_SIDE, SideKind, Unresolved, Window

_MENTIONED_FROM: Final = 0.1
_DEBUG_SYMBOLS: Final = "install its debug symbols (docs/faq.md)"
_FIXES: Final = {
    Unresolved.NO_NAME: _DEBUG_SYMBOLS,
    Unresolved.NO_SYMBOL_TABLE: _DEBUG_SYMBOLS,
    Unresolved.NO_FILE: "let the compiler write a perf map (docs/symbols.md)",
}


class _Place(NamedTuple):
    """Why frames have no name, and the file that contains their code (empty if unknown)."""

    reason: Unresolved
    module: str


@dataclass(slots=True)
class UnresolvedFrames:
    """Counts frames with and without names, weighted by samples.

    Attributes:
        places: number of user frames without a name, by reason and file.
    """

    frames: Counter[SideKind] = field(default_factory=Counter)
    unresolved: Counter[SideKind] = field(default_factory=Counter)
    places: Counter[_Place] = field(default_factory=Counter)

    @classmethod
    def of_windows(cls, windows: Iterable[Window]) -> Self:
        """Counts the frames of all samples in the given windows."""
        counts = cls()
        for window in windows:
            for _, sample in window.samples:
                weight = len(sample.timestamps_unix_ns)
                for side in sample.stack.sides:
                    counts.frames[side.kind] += weight * len(side.frames)
                    for frame in side.frames:
                        if frame.unresolved is None:
                            continue
                        counts.unresolved[side.kind] += weight
                        if side.kind is USER_SIDE:
                            module = frame.module.name if frame.module else ""
                            counts.places[_Place(frame.unresolved, module)] += weight
        return counts

    def __str__(self) -> str:
        """Describes unnamed frames: ``0.1% of kernel and 20.3% of user frames``."""
        kinds = [kind for kind in SIDES if self.frames[kind]] or [KERNEL_SIDE]
        shares = [f"{self._share(kind):.1%} of {kind.name}" for kind in kinds]
        return f"{' and '.join(shares)} frames"

    def remark(self) -> str:
        """Describes the main cause of unnamed user frames, the file affected, and a fix, if any."""
        if self._share(USER_SIDE) < _MENTIONED_FROM:
            return ""
        place, count = self.places.most_common(1)[0]
        fix = _FIXES.get(place.reason)
        if fix is None:
            return ""
        share = count / self.unresolved[USER_SIDE]
        where = f" are in {place.module}" if place.module else ""
        return f"{share:.0%} of unresolved user frames{where}: {place.reason.value}; {fix}"

    def _share(self, kind: SideKind) -> float:
        return self.unresolved[kind] / max(1, self.frames[kind])
