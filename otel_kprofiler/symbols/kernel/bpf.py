"""Finds the BPF function, trampoline, ftrace page or kprobe page at a given address and time.

Each symbol has an address range and a boottime range, so a single table covers all times. One
thread changes the table while other threads look up symbols without a lock. A change replaces
values in atomic steps, and does not affect lookups for earlier times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final, Protocol

from otel_kprofiler.model import (
    KERNEL_SIDE,
    Frame,
    Ksymbol,
    KsymbolAction,
    KsymbolBatch,
    KsymbolChange,
    KsymbolDetails,
    Line,
    Module,
    Unresolved,
)
from otel_kprofiler.symbols.kernel.kallsyms import PAGE_BYTES
from otel_kprofiler.symbols.kernel.snapshot import Match, make_code_module
from otel_kprofiler.symbols.kernel.table import MAX_FUNCTION_BYTES, Symbol

KEEP_NS: Final = 15_000_000_000
"""Time for which unloaded symbols are kept, to resolve samples taken before the unloading."""
MAX_KEPT: Final = 16_384
"""Maximum number of unloaded symbols that are kept."""
PROGRAM_PREFIX: Final = "bpf_prog_"
"""Name prefix of a BPF program's function. The program's tag follows the prefix."""

_LINGER_NS: Final = 10_000_000  # CPUs may still run code when its removal is announced
_MAX_BYTES: Final = 32 << 20
_PAGE_BITS: Final = 12
_UNTIL: Final = attrgetter("until_ns")
_FOREVER: Final = 1 << 63
NOW_NS: Final = _FOREVER - 1
"""The latest valid boottime; a lookup at this time finds only currently loaded symbols."""


class KsymbolSource(Protocol):
    """A source of symbol changes: the running kernel, or a recording."""

    def poll(self, now_ns: int) -> KsymbolBatch:
        """Returns changes since the last call; never blocks. ``now_ns`` is the current boottime."""

    def describe(self, symbol: Ksymbol) -> KsymbolDetails | None:
        """Returns details about a function in a BPF program; None if unknown. Thread-safe."""

    def count_lost(self) -> Mapping[str, int]:
        """Returns the number of records lost so far, by cause. Thread-safe."""

    def close(self) -> None:
        """Release all resources; idempotent."""


class LoadedKsymbol:
    """A symbol and its load period. When the symbol is unloaded, ``until_ns`` is set.

    If ``sure_ns`` is before ``until_ns``, records were lost after ``sure_ns``, so the symbol may
    have been unloaded and replaced. The uncertain period from ``sure_ns`` on is represented by a
    separate entry, whose ``is_uncertain`` is set and whose frames have no name.
    """

    __slots__ = ("_details", "_frames", "_module", "_source", "_uncertain", "end", "is_uncertain",
                 "since_ns", "sure_ns", "symbol", "until_ns")  # fmt: skip

    def __init__(
        self,
        symbol: Ksymbol,
        end: int,
        since_ns: int,
        source: KsymbolSource | None = None,
        *,
        is_uncertain: bool = False,
    ) -> None:
        self.symbol = symbol
        self.end = end
        self.since_ns = since_ns
        self.until_ns = self.sure_ns = _FOREVER
        self.is_uncertain = is_uncertain
        self._source = source
        self._frames: dict[int, Frame] | None = None  # most symbols never appear in a stack
        self._module: Module | None = None
        self._details: KsymbolDetails | None = None
        self._uncertain: LoadedKsymbol | None = None

    def covers(self, address: int, time_ns: int) -> bool:
        """Returns whether this symbol certainly covered an address at the given boottime."""
        inside = self.symbol.start <= address < self.end
        return inside and self.since_ns <= time_ns < min(self.until_ns, self.sure_ns)

    def is_program(self) -> bool:
        """Returns whether this is a BPF program's function."""
        return self.symbol.name.startswith(PROGRAM_PREFIX)

    def make_uncertain(self, until_ns: int) -> LoadedKsymbol:
        """Returns an entry for ``[sure_ns, until_ns)``, in which this symbol is uncertain."""
        made = self._uncertain
        if made is None or (made.since_ns, made.until_ns) != (self.sure_ns, until_ns):
            made = LoadedKsymbol(self.symbol, self.end, self.sure_ns, is_uncertain=True)
            made.until_ns = until_ns
            self._uncertain = made
        return made

    def frame(self, address: int) -> Frame:
        """Returns the frame for an address in this symbol."""
        if self._frames is None:
            self._frames = {}
        frame = self._frames.get(address)
        return frame or self._frames.setdefault(address, self._make_frame(address))

    def module(self) -> Module:
        """Returns the symbol's module; the first call queries the source for details."""
        if self._module is None:
            self._details = self._source.describe(self.symbol) if self._source else None
            program = self._details.program if self._details else None
            symbol = Symbol(self.symbol.name, self.symbol.start, self.end)
            self._module = make_code_module(self.symbol.kind, symbol, program)
        return self._module

    def _make_frame(self, address: int) -> Frame:
        if self.is_uncertain:
            return Frame(None, address, (), 0, KERNEL_SIDE, Unresolved.RECORDS_LOST)
        module = self.module()
        offset = address - self.symbol.start
        file, number = "", 0
        for start, at_file, at_line in self._details.lines if self._details else ():
            if start > offset:
                break
            file, number = at_file, at_line
        line = Line(self.symbol.name, "", file, number)
        return Frame(module, offset, (line,), offset, KERNEL_SIDE)


class KsymbolTable:
    """A table of loaded symbols and recently unloaded symbols."""

    def __init__(self, source: KsymbolSource | None = None) -> None:
        self._source = source
        self._live: dict[int, LoadedKsymbol] = {}  # by start address
        self._pages: dict[int, tuple[LoadedKsymbol, ...]] = {}  # live symbols by page
        self._ended: list[LoadedKsymbol] = []  # unloaded symbols, sorted by end
        self._read_ns = 0
        # keys: True for BPF programs, False for other symbols
        self._lost_ns = dict.fromkeys((True, False), _FOREVER)
        self._noticed_ns = -1

    def apply(self, change: KsymbolChange) -> None:
        """Apply a change. Changes to a symbol must be applied in chronological order."""
        if change.action is KsymbolAction.ADDED:
            for symbol in change.symbols:
                self._add(symbol, symbol.since_ns or change.time_ns)
        elif change.action is KsymbolAction.REMOVED:
            for symbol in change.symbols:
                self._remove(symbol, change.time_ns)
        elif change.action is KsymbolAction.LOST:
            self._noticed_ns = max(self._noticed_ns, change.until_ns)
            self._mark_uncertain(change.time_ns, programs_only=False)
        else:
            self._read(change)
        self._forget(change.time_ns)

    def lookup(self, address: int, time_ns: int = NOW_NS) -> LoadedKsymbol | None:
        """Returns the symbol at an address and boottime (by default, now); None if there is none.

        If records were lost around ``time_ns``, the result may be an entry with ``is_uncertain``
        set.
        """
        best: LoadedKsymbol | None = None
        below = -1
        for entry in self._pages.get(address >> _PAGE_BITS, ()):
            if below < entry.symbol.start <= address and entry.since_ns <= time_ns < entry.until_ns:
                best, below = entry, entry.symbol.start
        if best is not None and address < best.end:
            return best if time_ns < best.sure_ns else best.make_uncertain(best.sure_ns)
        uncertain = leaving = None
        for entry in reversed(self._ended):
            if entry.until_ns + _LINGER_NS <= time_ns:
                break
            if entry.symbol.start <= address < entry.end and entry.since_ns <= time_ns:
                if entry.is_uncertain:
                    uncertain = entry if time_ns < entry.until_ns else uncertain
                elif time_ns < entry.until_ns:
                    return entry
                else:
                    leaving = leaving or entry
        return uncertain or leaving

    def live(self) -> list[LoadedKsymbol]:
        """Returns the loaded symbols, sorted by address."""
        return [entry for _, entry in sorted(self._live.items())]

    def find(self, name: str, *, prefix: bool = False) -> list[Match]:
        """Returns the loaded symbols with the given name or prefix, sorted by address."""
        return [
            Match(entry.symbol.name, entry.symbol.start, entry.end, entry.module(), 0)
            for entry in self.live()
            if entry.symbol.name == name or (prefix and entry.symbol.name.startswith(name))
        ]

    def _add(self, symbol: Ksymbol, since_ns: int, end: int = 0) -> None:
        live = self._live.get(symbol.start)
        end = end or symbol.start + min(symbol.length or limit_bytes(symbol), _MAX_BYTES)
        if live is not None and live.symbol.name == symbol.name and live.sure_ns == _FOREVER:
            if not symbol.length or live.symbol.length:
                return
            # the symbol is already known; only its length is new
            since_ns = symbol.since_ns or min(since_ns, live.since_ns)
            self._drop(live)
        missed = [
            other
            for other in self._overlapping(symbol.start, end)
            if (symbol.length and other.symbol.length) or other.symbol.start == symbol.start
        ]
        if missed:
            self._end(missed, since_ns)
        entry = LoadedKsymbol(symbol, end, since_ns, self._source)
        if since_ns <= self._noticed_ns and self._lost_ns[entry.is_program()] != _FOREVER:
            entry.sure_ns = since_ns  # the removal record may have been lost
        self._live[symbol.start] = entry
        for page in _pages(symbol.start, end):
            self._pages[page] = (*self._pages.get(page, ()), entry)

    def _remove(self, symbol: Ksymbol, time_ns: int) -> None:
        live = self._live.get(symbol.start)
        if live is None:
            # The symbol's load record was lost, so the symbol was loaded after the last full read.
            entry = LoadedKsymbol(symbol, symbol.start + symbol.length, self._read_ns, self._source)
            lost_ns = self._lost_ns[entry.is_program()]
            if lost_ns != _FOREVER:
                entry.since_ns = entry.sure_ns = lost_ns
            self._end([entry], time_ns)
        elif live.symbol.name == symbol.name and live.since_ns <= time_ns:
            self._end([live], time_ns)

    def _mark_uncertain(self, time_ns: int, *, programs_only: bool) -> None:
        """Mark symbols as uncertain from the given time until the symbol list is next read."""
        for programs in (True,) if programs_only else (True, False):
            self._lost_ns[programs] = min(self._lost_ns[programs], time_ns)
        for entry in self._live.values():
            if entry.is_program() or not programs_only:
                entry.sure_ns = min(entry.sure_ns, max(time_ns, entry.since_ns))

    def _read(self, change: KsymbolChange) -> None:
        """Update the table from a full read of the symbol list, which may change concurrently."""
        began_ns = change.time_ns
        programs_only = change.action is KsymbolAction.PROGRAMS_READ
        present = {symbol.start: symbol for symbol in change.symbols}
        entries = [
            entry
            for entry in self._live.values()
            if entry.since_ns <= began_ns and (entry.is_program() or not programs_only)
        ]
        gone = [entry for entry in entries if not _is_still(entry, present.get(entry.symbol.start))]
        self._end(gone, began_ns)
        for entry in set(entries) - set(gone):
            entry.sure_ns = _FOREVER
        lost_ns = dict(self._lost_ns)
        self._lost_ns |= dict.fromkeys((True,) if programs_only else (True, False), _FOREVER)
        self._add_found(present, began_ns, lost_ns)
        self._read_ns = max(self._read_ns, began_ns)
        if began_ns <= self._noticed_ns:
            self._mark_uncertain(began_ns, programs_only=programs_only)

    def _add_found(
        self, present: Mapping[int, Ksymbol], began_ns: int, lost_ns: Mapping[bool, int]
    ) -> None:
        """Add symbols found only in a full read, because their records were lost."""
        gone = {
            (entry.symbol.start, entry.symbol.name)
            for entry in self._ended
            if entry.until_ns >= began_ns and not entry.is_uncertain
        }
        ordered = sorted(present.values())
        starts = [symbol.start for symbol in ordered] + [_FOREVER * 2]
        for symbol, following in zip(ordered, starts[1:], strict=True):
            if (symbol.start, symbol.name) in gone:
                continue
            end = min(symbol.start + (symbol.length or limit_bytes(symbol)), following)
            if not all(
                entry.since_ns <= began_ns for entry in self._overlapping(symbol.start, end)
            ):
                continue
            missed = LoadedKsymbol(symbol, end, self._read_ns)
            missed.sure_ns = lost_ns[missed.is_program()]
            if missed.sure_ns == _FOREVER:
                self._add(symbol, symbol.since_ns or self._read_ns, end)
                continue
            is_new = self._live.get(symbol.start) is None
            since_ns = symbol.since_ns or began_ns
            self._add(symbol, since_ns, end)
            if is_new and missed.sure_ns < since_ns:
                self._keep_ended([missed.make_uncertain(since_ns)])

    def _end(self, entries: Sequence[LoadedKsymbol], time_ns: int) -> None:
        """Mark symbols as unloaded at ``time_ns``, and add entries for periods of uncertainty."""
        ended = []
        for entry in entries:
            if entry.sure_ns < time_ns:
                ended.append(entry.make_uncertain(time_ns))
            entry.until_ns = max(min(time_ns, entry.sure_ns), entry.since_ns)
            self._drop(entry)
        self._keep_ended([*entries, *ended])

    def _keep_ended(self, entries: Sequence[LoadedKsymbol]) -> None:
        last_ns = self._ended[-1].until_ns if self._ended else 0
        self._ended.extend(sorted(entries, key=_UNTIL))
        if entries and min(map(_UNTIL, entries)) < last_ns:
            self._ended = sorted(self._ended, key=_UNTIL)

    def _drop(self, entry: LoadedKsymbol) -> None:
        if self._live.get(entry.symbol.start) is not entry:
            return
        del self._live[entry.symbol.start]
        for page in _pages(entry.symbol.start, entry.end):
            left = tuple(other for other in self._pages[page] if other is not entry)
            if left:
                self._pages[page] = left
            else:
                del self._pages[page]

    def _overlapping(self, start: int, end: int) -> set[LoadedKsymbol]:
        return {
            entry
            for page in _pages(start, end)
            for entry in self._pages.get(page, ())
            if entry.symbol.start < end and start < entry.end
        }

    def _forget(self, now_ns: int) -> None:
        ended = self._ended
        if len(ended) < MAX_KEPT and not (
            ended and ended[len(ended) // 2].until_ns < now_ns - KEEP_NS
        ):
            return
        recent = ended[-MAX_KEPT // 2 :]
        self._ended = [entry for entry in recent if entry.until_ns >= now_ns - KEEP_NS]


def _is_still(entry: LoadedKsymbol, present: Ksymbol | None) -> bool:
    """Returns whether ``present`` is still the entry's symbol, rather than a reloaded one."""
    if present is None or present.name != entry.symbol.name:
        return False
    return entry.sure_ns == _FOREVER or present.since_ns <= entry.since_ns


def limit_bytes(symbol: Ksymbol) -> int:
    """Returns an upper bound on the size, in bytes, of a symbol whose length is unknown."""
    return MAX_FUNCTION_BYTES if symbol.name.startswith(PROGRAM_PREFIX) else PAGE_BYTES


def _pages(start: int, end: int) -> range:
    return range(start >> _PAGE_BITS, ((end - 1) >> _PAGE_BITS) + 1)
