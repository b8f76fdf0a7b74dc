"""Kernel code outside vmlinux and modules: BPF functions, trampolines, ftrace and kprobe pages.

Each symbol is an interval of addresses and of boot time, so one table answers for all times and
loading copies nothing. One thread changes the table while others look up without a lock: each
change replaces single values, and never alters the answer for a time before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Final, Protocol

from otel_kprofiler.model import (
    AddressRange,
    Frame,
    FrameKind,
    Ksymbol,
    KsymbolAction,
    KsymbolBatch,
    KsymbolChange,
    KsymbolDetails,
    Line,
    Module,
    ModuleKind,
    RangeSource,
    Unresolved,
)
from otel_kprofiler.symbols.kernel.identity import make_file_id
from otel_kprofiler.symbols.kernel.kallsyms import PAGE_BYTES
from otel_kprofiler.symbols.kernel.snapshot import Match
from otel_kprofiler.symbols.kernel.table import MAX_FUNCTION_BYTES

KEEP_NS: Final = 15_000_000_000
"""How long unloaded symbols are kept, for samples taken before."""
KEEP_MOST: Final = 16_384
"""Limit on the number of unloaded symbols kept."""
PROGRAM_PREFIX: Final = "bpf_prog_"
"""Prefix of BPF program functions, followed by the tag; the kernel uses it for nothing else."""

_LINGER_NS: Final = 10_000_000  # CPUs may still run code when its removal is announced
_LARGEST_BYTES: Final = 32 << 20
_PAGE_BITS: Final = 12
_UNTIL: Final = attrgetter("until_ns")
_FOREVER: Final = 1 << 63
NOW_NS: Final = _FOREVER - 1
"""A time at which only symbols that are still loaded match."""


class KsymbolSource(Protocol):
    """Where changes come from: the running kernel, or a recording."""

    def poll(self, now_ns: int) -> KsymbolBatch:
        """Changes since the last call; ``now_ns`` is the boot time. Does not block."""

    def describe(self, symbol: Ksymbol) -> KsymbolDetails | None:
        """Details of a BPF program's function; None if unknown. Thread-safe."""

    def count_lost(self) -> Mapping[str, int]:
        """Records lost so far, by cause. Thread-safe."""

    def close(self) -> None:
        """Release all resources; idempotent."""


class LoadedKsymbol:
    """A symbol while it is loaded; ``until_ns`` is set when it is unloaded.

    If ``sure_ns`` is before ``until_ns``, records were lost from ``sure_ns`` on: the symbol may
    have been unloaded and replaced unseen. Once that period has ended, a separate entry with
    ``is_doubt`` stands for it; its frames have no name.
    """

    __slots__ = ("_details", "_doubt", "_frames", "_module", "_source", "end", "is_doubt",
                 "since_ns", "sure_ns", "symbol", "until_ns")  # fmt: skip

    def __init__(
        self,
        symbol: Ksymbol,
        end: int,
        since_ns: int,
        source: KsymbolSource | None = None,
        *,
        is_doubt: bool = False,
    ) -> None:
        self.symbol = symbol
        self.end = end
        self.since_ns = since_ns
        self.until_ns = self.sure_ns = _FOREVER
        self.is_doubt = is_doubt
        self._source = source
        self._frames: dict[int, Frame] | None = None  # most symbols never appear in a stack
        self._module: Module | None = None
        self._details: KsymbolDetails | None = None
        self._doubt: LoadedKsymbol | None = None

    def covers(self, address: int, time_ns: int) -> bool:
        """Whether this symbol is known to have been at an address at a boot time."""
        inside = self.symbol.start <= address < self.end
        return inside and self.since_ns <= time_ns < min(self.until_ns, self.sure_ns)

    def is_program(self) -> bool:
        """Whether this is a BPF program's function."""
        return self.symbol.name.startswith(PROGRAM_PREFIX)

    def doubt(self, until_ns: int) -> LoadedKsymbol:
        """An entry for ``[sure_ns, until_ns)``, when this symbol may have been replaced."""
        doubt = self._doubt
        if doubt is None or (doubt.since_ns, doubt.until_ns) != (self.sure_ns, until_ns):
            doubt = self._doubt = LoadedKsymbol(self.symbol, self.end, self.sure_ns, is_doubt=True)
            doubt.until_ns = until_ns
        return doubt

    def frame(self, address: int) -> Frame:
        """The frame of an address in this symbol; cached."""
        if self._frames is None:
            self._frames = {}
        frame = self._frames.get(address)
        return frame or self._frames.setdefault(address, self._make_frame(address))

    def module(self) -> Module:
        """The module that stands for this symbol; the first call asks the source for details."""
        if self._module is None:
            self._details = self._source.describe(self.symbol) if self._source else None
            program = self._details.program if self._details else None
            self._module = replace(make_code_module(self.symbol, self.end), program=program)
        return self._module

    def _make_frame(self, address: int) -> Frame:
        if self.is_doubt:
            return Frame(None, address, (), 0, FrameKind.KERNEL, Unresolved.RECORDS_LOST)
        module = self.module()
        offset = address - self.symbol.start
        file, number = "", 0
        for start, at_file, at_line in self._details.lines if self._details else ():
            if start > offset:
                break
            file, number = at_file, at_line
        line = Line(self.symbol.name, "", file, number)
        kind = FrameKind.BPF if module.kind is ModuleKind.BPF else FrameKind.KERNEL
        return Frame(module, offset, (line,), offset, kind)


def make_code_module(symbol: Ksymbol, end: int) -> Module:
    """A module that stands for a BPF function or trampoline."""
    name = symbol.name
    ranges = (AddressRange(symbol.start, end, name),)
    file_id = make_file_id(None, name)
    return Module(name, symbol.kind, None, file_id, symbol.start, ranges, RangeSource.KERNEL)


class KsymbolTable:
    """Loaded symbols, and recently unloaded ones.

    Args:
        source: where details of BPF programs come from.
    """

    def __init__(self, source: KsymbolSource | None = None) -> None:
        self._source = source
        self._live: dict[int, LoadedKsymbol] = {}  # by start
        self._pages: dict[int, tuple[LoadedKsymbol, ...]] = {}  # live ones by page
        self._ended: list[LoadedKsymbol] = []  # in the order of their ends
        self._read_ns = 0
        self._lost_ns = dict.fromkeys((True, False), _FOREVER)  # by whether of BPF programs
        self._noticed_ns = -1

    def __len__(self) -> int:
        return len(self._live)

    def apply(self, change: KsymbolChange) -> None:
        """Apply a change; changes of one symbol must be in order of time."""
        if change.action is KsymbolAction.ADDED:
            for symbol in change.symbols:
                self._add(symbol, symbol.since_ns or change.time_ns)
        elif change.action is KsymbolAction.REMOVED:
            for symbol in change.symbols:
                self._remove(symbol, change.time_ns)
        elif change.action is KsymbolAction.LOST:
            self._noticed_ns = max(self._noticed_ns, change.until_ns)
            self._lose(change.time_ns, programs_only=False)
        else:
            self._read(change)
        self._forget(change.time_ns)

    def lookup(self, address: int, time_ns: int = NOW_NS) -> LoadedKsymbol | None:
        """The symbol at an address at a boot time, by default now; None if there was none.

        Where records were lost, it may be an entry with ``is_doubt``.
        """
        best: LoadedKsymbol | None = None
        below = -1
        for code in self._pages.get(address >> _PAGE_BITS, ()):
            if below < code.symbol.start <= address and code.since_ns <= time_ns < code.until_ns:
                best, below = code, code.symbol.start
        if best is not None and address < best.end:
            return best if time_ns < best.sure_ns else best.doubt(best.sure_ns)
        doubt = leaving = None
        for code in reversed(self._ended):
            if code.until_ns + _LINGER_NS <= time_ns:
                break
            if code.symbol.start <= address < code.end and code.since_ns <= time_ns:
                if code.is_doubt:
                    doubt = code if time_ns < code.until_ns else doubt
                elif time_ns < code.until_ns:
                    return code
                else:
                    leaving = leaving or code
        return doubt or leaving

    def live(self) -> list[LoadedKsymbol]:
        """The loaded symbols, by address."""
        return [code for _, code in sorted(self._live.items())]

    def find(self, name: str, *, prefix: bool = False) -> list[Match]:
        """Loaded symbols with a name or a prefix, by address."""
        return [
            Match(code.symbol.name, code.symbol.start, code.end, code.module(), 0)
            for code in self.live()
            if code.symbol.name == name or (prefix and code.symbol.name.startswith(name))
        ]

    def _add(self, symbol: Ksymbol, since_ns: int, end: int = 0) -> None:
        known = self._live.get(symbol.start)
        end = end or symbol.start + min(symbol.length or limit_bytes(symbol), _LARGEST_BYTES)
        if known is not None and known.symbol.name == symbol.name and known.sure_ns == _FOREVER:
            if not symbol.length or known.symbol.length:
                return
            since_ns = symbol.since_ns or min(since_ns, known.since_ns)  # the length is new
            self._drop(known)
        missed = [
            other
            for other in self._overlapping(symbol.start, end)
            if (symbol.length and other.symbol.length) or other.symbol.start == symbol.start
        ]
        if missed:
            self._end(missed, since_ns)
        code = LoadedKsymbol(symbol, end, since_ns, self._source)
        if since_ns <= self._noticed_ns and self._lost_ns[code.is_program()] != _FOREVER:
            code.sure_ns = since_ns  # the record of its removal may be lost
        self._live[symbol.start] = code
        for page in _pages(code):
            self._pages[page] = (*self._pages.get(page, ()), code)

    def _remove(self, symbol: Ksymbol, time_ns: int) -> None:
        known = self._live.get(symbol.start)
        if known is None:
            # The record of its loading was lost, so it was loaded after the last full reading.
            code = LoadedKsymbol(symbol, symbol.start + symbol.length, self._read_ns, self._source)
            lost_ns = self._lost_ns[code.is_program()]
            if lost_ns != _FOREVER:
                code.since_ns = code.sure_ns = lost_ns
            self._end([code], time_ns)
        elif known.symbol.name == symbol.name and known.since_ns <= time_ns:
            self._end([known], time_ns)

    def _lose(self, time_ns: int, *, programs_only: bool) -> None:
        """Mark symbols as uncertain from a time on, until the next reading."""
        for programs in (True,) if programs_only else (True, False):
            self._lost_ns[programs] = min(self._lost_ns[programs], time_ns)
        for code in self._live.values():
            if code.is_program() or not programs_only:
                code.sure_ns = min(code.sure_ns, max(time_ns, code.since_ns))

    def _read(self, change: KsymbolChange) -> None:
        """Bring the table in line with a reading, which may contain changes made during it."""
        began_ns = change.time_ns
        programs_only = change.action is KsymbolAction.PROGRAMS_READ
        found = {symbol.start: symbol for symbol in change.symbols}
        known = [
            code
            for code in self._live.values()
            if code.since_ns <= began_ns and (code.is_program() or not programs_only)
        ]
        gone = [code for code in known if not _is_still(code, found.get(code.symbol.start))]
        self._end(gone, began_ns)
        for code in set(known) - set(gone):
            code.sure_ns = _FOREVER
        lost_ns = dict(self._lost_ns)
        self._lost_ns |= dict.fromkeys((True,) if programs_only else (True, False), _FOREVER)
        self._add_found(found, began_ns, lost_ns)
        self._read_ns = max(self._read_ns, began_ns)
        if began_ns <= self._noticed_ns:
            self._lose(began_ns, programs_only=programs_only)

    def _add_found(
        self, found: Mapping[int, Ksymbol], began_ns: int, lost_ns: Mapping[bool, int]
    ) -> None:
        """Add symbols that only the reading has; their records were lost."""
        gone = {
            (code.symbol.start, code.symbol.name)
            for code in self._ended
            if code.until_ns >= began_ns and not code.is_doubt
        }
        ordered = sorted(found.values())
        starts = [symbol.start for symbol in ordered] + [_FOREVER * 2]
        for symbol, following in zip(ordered, starts[1:], strict=True):
            if (symbol.start, symbol.name) in gone:
                continue
            end = min(symbol.start + (symbol.length or limit_bytes(symbol)), following)
            if not all(code.since_ns <= began_ns for code in self._overlapping(symbol.start, end)):
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
                self._keep_ended([missed.doubt(since_ns)])

    def _end(self, codes: Sequence[LoadedKsymbol], time_ns: int) -> None:
        """Mark symbols as unloaded at a time; keep an uncertain entry from ``sure_ns`` to then."""
        ended = []
        for code in codes:
            if code.sure_ns < time_ns:
                ended.append(code.doubt(time_ns))
            code.until_ns = max(min(time_ns, code.sure_ns), code.since_ns)
            self._drop(code)
        self._keep_ended([*codes, *ended])

    def _keep_ended(self, codes: Sequence[LoadedKsymbol]) -> None:
        last_ns = self._ended[-1].until_ns if self._ended else 0
        self._ended.extend(sorted(codes, key=_UNTIL))
        if codes and min(map(_UNTIL, codes)) < last_ns:
            self._ended = sorted(self._ended, key=_UNTIL)

    def _drop(self, code: LoadedKsymbol) -> None:
        if self._live.get(code.symbol.start) is not code:
            return
        del self._live[code.symbol.start]
        for page in _pages(code):
            left = tuple(other for other in self._pages[page] if other is not code)
            if left:
                self._pages[page] = left
            else:
                del self._pages[page]

    def _overlapping(self, start: int, end: int) -> set[LoadedKsymbol]:
        pages = range(start >> _PAGE_BITS, ((end - 1) >> _PAGE_BITS) + 1)
        return {
            code
            for page in pages
            for code in self._pages.get(page, ())
            if code.symbol.start < end and start < code.end
        }

    def _forget(self, now_ns: int) -> None:
        ended = self._ended
        if len(ended) < KEEP_MOST and not (
            ended and ended[len(ended) // 2].until_ns < now_ns - KEEP_NS
        ):
            return
        kept = [code for code in ended[-KEEP_MOST // 2 :] if code.until_ns >= now_ns - KEEP_NS]
        self._ended = kept


def _is_still(code: LoadedKsymbol, found: Ksymbol | None) -> bool:
    """Whether a reading shows the known symbol, not another load of the same program."""
    if found is None or found.name != code.symbol.name:
        return False
    return code.sure_ns == _FOREVER or found.since_ns <= code.since_ns


def limit_bytes(symbol: Ksymbol) -> int:
    """Upper bound on the size of a symbol of unknown length, in bytes."""
    return MAX_FUNCTION_BYTES if symbol.name.startswith(PROGRAM_PREFIX) else PAGE_BYTES


def _pages(code: LoadedKsymbol) -> Iterable[int]:
    return range(code.symbol.start >> _PAGE_BITS, ((code.end - 1) >> _PAGE_BITS) + 1)
