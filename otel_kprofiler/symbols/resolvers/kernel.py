"""Resolves addresses in the running kernel."""

import threading
from collections.abc import Sequence

from otel_kprofiler.model import KERNEL_SIDE, Frame, Line, Unresolved
from otel_kprofiler.symbols.kernel.snapshot import Match
from otel_kprofiler.symbols.kernel.symbolizer import KernelSymbolizer
from otel_kprofiler.symbols.resolution import FIRST_KERNEL_ADDRESS, Resolution, make_unknown


class KernelResolver:
    """Resolves addresses in kernel code: vmlinux, modules, BPF programs. Thread-safe.

    Args:
        symbolizer: provides the symbols, and is closed along with the resolver. By default, this
            host's symbols are read at the first query. To track code as it is loaded and unloaded,
            pass a symbolizer that tracks changes, and call its :meth:`KernelSymbolizer.advance`.
    """

    def __init__(self, symbolizer: KernelSymbolizer | None = None) -> None:
        self._symbolizer = symbolizer
        self._lock = threading.Lock()

    @property
    def symbolizer(self) -> KernelSymbolizer:
        """Returns the symbolizer. The default symbolizer is created on first use."""
        with self._lock:
            if self._symbolizer is None:
                self._symbolizer = KernelSymbolizer.live()
            return self._symbolizer

    def resolve(self, addresses: Sequence[int], pid: int | None = None) -> list[Resolution]:
        """Resolves kernel addresses, which are the same in all processes."""
        symbolizer = self.symbolizer
        answers = []
        for address in addresses:
            if address >= FIRST_KERNEL_ADDRESS:
                (frame,) = symbolizer.resolve_addresses([address])
                answers.append(Resolution(address, frame))
            else:
                answers.append(make_unknown(address, Unresolved.UNMAPPED))
        return answers

    def find(self, name: str, pid: int | None = None) -> list[Resolution]:
        """Finds all kernel functions with a linkage name; none if ``pid`` is set."""
        return [] if pid is not None else [*map(_resolution, self.symbolizer.find(name))]

    def close(self) -> None:
        """Close the symbolizer."""
        with self._lock:
            if self._symbolizer is not None:
                self._symbolizer.close()


def _resolution(match: Match) -> Resolution:
    place = match.address if match.module is None else match.rva
    frame = Frame(match.module, place, (Line(match.name),), 0, KERNEL_SIDE, None, match.builtin)
    return Resolution(match.address, frame)
