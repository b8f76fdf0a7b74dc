"""Holds all kernel symbols as of a given time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Final, NamedTuple

from otel_kprofiler.model import (
    KERNEL_SIDE,
    AddressRange,
    BpfProgram,
    BuildId,
    Frame,
    Ksymbol,
    Module,
    ModuleKind,
    RangeSource,
    Unresolved,
)
from otel_kprofiler.symbols.kernel.builtin import NO_BUILTIN, BuiltinRanges
from otel_kprofiler.symbols.kernel.explain import Explanation, explain_frame
from otel_kprofiler.symbols.kernel.hidden import HiddenCause
from otel_kprofiler.symbols.kernel.identity import make_file_id
from otel_kprofiler.symbols.kernel.kallsyms import FreedSymbol
from otel_kprofiler.symbols.kernel.names import make_line
from otel_kprofiler.symbols.kernel.table import Symbol, SymbolTable

VMLINUX: Final = "vmlinux"
INTERRUPT_SECTIONS: Final = ("entry", "irqentry", "softirqentry")


class ModuleSymbols(NamedTuple):
    """A module and its symbols.

    ``table`` is None if the symbols could not be read, or are still ``pending``.
    """

    module: Module
    table: SymbolTable | None
    pending: bool = False


class CodeBlock(NamedTuple):
    """Symbols for kernel code outside modules: BPF programs, trampolines and kprobe pages."""

    kind: ModuleKind
    table: SymbolTable


class Match(NamedTuple):
    """A symbol found by name; ``rva`` is relative to ``module``."""

    name: str
    address: int
    end: int
    module: Module | None
    rva: int
    builtin: tuple[str, ...] = ()


class Snapshot:
    """The kernel symbols at a given time; immutable, hence thread-safe.

    Args:
        modules: modules with their symbols, vmlinux first. Where ranges overlap, later modules take
            precedence.
        blocks: symbols outside modules.
        freed: symbols that ftrace keeps for init functions whose memory was freed.
        since_ns: boottime from which the snapshot is valid.
        hidden: why symbols are hidden; None if they are not hidden.
        problems: one sentence for each unreadable or corrupt file.
        bad_lines: number of lines skipped in kallsyms and the module list.
        builtin: built-in modules, by address in vmlinux.
    """

    def __init__(
        self,
        modules: Sequence[ModuleSymbols],
        *,
        blocks: Sequence[CodeBlock] = (),
        freed: Sequence[FreedSymbol] = (),
        generation: int = 1,
        since_ns: int = 0,
        hidden: HiddenCause | None = None,
        vmlinux_build_id: BuildId | None = None,
        problems: Sequence[str] = (),
        bad_lines: int = 0,
        builtin: BuiltinRanges = NO_BUILTIN,
    ) -> None:
        self.generation = generation
        self.since_ns = since_ns
        self.hidden = hidden
        self.vmlinux_build_id = vmlinux_build_id
        self.problems = tuple(problems)
        self.bad_lines = bad_lines
        self.builtin = builtin
        self._blocks = tuple(blocks)
        self._programs: dict[int, Module] = {}  # by start address; built on first use
        self.freed = tuple(freed)
        self._set_modules(modules)
        self._init_text = self._find_range("_sinittext", "_einittext", ".init.text")

    def _set_modules(
        self, modules: Sequence[ModuleSymbols], gone: Sequence[AddressRange] = ()
    ) -> None:
        self._gone = tuple(gone)
        self._by_name: Mapping[str, ModuleSymbols] = {m.module.name: m for m in modules}
        self.modules: tuple[Module, ...] = tuple(m.module for m in self._by_name.values())
        regions = _disjoint(
            (part, symbols) for symbols in modules for part in symbols.module.ranges
        )
        self._starts = [part.start for part, _ in regions]
        self._ends = [part.end for part, _ in regions]
        self._owners = [symbols for _, symbols in regions]

    def _find_range(self, first: str, last: str, name: str) -> AddressRange | None:
        """Returns the range between two markers in vmlinux; None if they are missing."""
        core = self._by_name.get(VMLINUX)
        if core is None or core.table is None:
            return None
        start, end = (core.table.find_address(marker.encode()) for marker in (first, last))
        if start is None or end is None or start >= end:
            return None
        return AddressRange(start, end, name)

    def _find_section(self, section: str) -> AddressRange | None:
        """Returns the range of a vmlinux text section; None if its marker symbols are missing."""
        return self._find_range(f"__{section}_text_start", f"__{section}_text_end", section)

    def loaded(self) -> tuple[ModuleSymbols, ...]:
        """Returns all modules except vmlinux, oldest first."""
        symbols = self._by_name.values()
        return tuple(each for each in symbols if each.module.kind is ModuleKind.LOADED)

    def with_modules(
        self,
        loaded: Sequence[ModuleSymbols],
        *,
        generation: int,
        since_ns: int,
        gone: Sequence[AddressRange] = (),
    ) -> Snapshot:
        """Returns a copy in which ``loaded`` replaces all modules but vmlinux.

        ``loaded`` is sorted oldest first. ``gone`` contains the address ranges of unloaded modules.
        """
        other = copy(self)
        core = [self._by_name[VMLINUX]] if VMLINUX in self._by_name else []
        other._set_modules((*core, *loaded), gone)  # noqa: SLF001 - a copy of this very class
        other.generation, other.since_ns = generation, since_ns
        return other

    def with_tables(self, make: Mapping[str, Callable[[int], SymbolTable]]) -> Snapshot:
        """Returns a copy with the symbol tables of some modules replaced.

        ``make`` maps a module's build id to a function that builds the table from the base address.
        """
        symbols = []
        for module_symbols in self._by_name.values():
            make_table = make.get(module_symbols.module.build_id or "")
            symbols.append(
                module_symbols._replace(table=make_table(module_symbols.module.base))
                if make_table
                else module_symbols
            )
        other = copy(self)
        other._set_modules(symbols)  # noqa: SLF001 - a copy of this very class
        return other

    def module(self, name: str) -> Module | None:
        """Returns the module with this name (``vmlinux``, ``ext4``); None if it is not loaded."""
        symbols = self._by_name.get(name)
        return symbols.module if symbols else None

    def frame(self, address: int) -> Frame:
        """Creates the frame for a runtime address that :func:`lookup_addresses` has adjusted."""
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._ends[index]:
            return self._frame_outside(address, self._starts[index] if index >= 0 else 0)
        module, table, pending = self._owners[index]
        rva = address - module.base
        builtin = self.builtin.find(address) if module.kind is ModuleKind.VMLINUX else ()
        section = self._starts[index], self._ends[index]
        symbol = table.lookup(address, section) if table is not None else None
        if symbol is None:
            reason = Unresolved.NO_SYMBOL if table is not None else Unresolved.NO_SYMBOL_TABLE
            reason = Unresolved.NOT_YET_KNOWN if pending else reason
            reason = Unresolved.HIDDEN if self.hidden else reason
            return Frame(module, rva, (), 0, KERNEL_SIDE, reason, builtin)
        name, start = symbol
        return Frame(module, rva, (make_line(name),), address - start, KERNEL_SIDE, None, builtin)

    def find(self, name: str, *, prefix: bool = False) -> tuple[Match, ...]:
        """Finds all symbols with this linkage name (including suffixes), or with this prefix.

        The result is sorted by module and address, and includes markers such as ``_etext``.
        """
        raw = name.encode("utf-8", "surrogateescape")
        matches = []
        for module, table, _ in self._by_name.values():
            if table is None:
                continue
            for index in table.find(raw, prefix=prefix):
                symbol = table.symbol(index)
                name, start, end = symbol
                builtin = self.builtin.find(start) if module.name == VMLINUX else ()
                matches.append(Match(name, start, end, module, start - module.base, builtin))
        for block in self._blocks:
            for index in block.table.find(raw, prefix=prefix):
                symbol = block.table.symbol(index)
                module = self._program(block.kind, symbol)
                matches.append(Match(symbol.name, symbol.start, symbol.end, module, 0))
        return tuple(matches)

    def interrupt_ranges(self) -> tuple[AddressRange, ...]:
        """Returns the ranges of interrupt and system call entry code, as marked by the linker.

        The ranges are named ``entry``, ``irqentry`` and ``softirqentry``. Ranges may be missing or
        nested.
        """
        return tuple(filter(None, map(self._find_section, INTERRUPT_SECTIONS)))

    def scheduler_rvas(self) -> range:
        """Returns the RVAs in vmlinux of functions marked with ``__sched``; empty if unknown.

        Threads wait in ``__sched`` functions, which the kernel omits from stacks of blocked threads
        (``in_sched_functions()``, kernel/sched/core.c).
        """
        section, vmlinux = self._find_section("sched"), self.module(VMLINUX)
        if section is None or vmlinux is None:
            return range(0)
        return range(section.start - vmlinux.base, section.end - vmlinux.base)

    def explain(self, address: int) -> Explanation:
        """Explain how a runtime address is symbolized."""
        frame = self.frame(address)
        index = bisect_right(self._starts, address) - 1
        inside = index >= 0 and address < self._ends[index]
        ranges = frame.module.ranges if frame.module else ()
        section = next((part.name for part in ranges if part.start <= address < part.end), "")
        start = end = 0
        names: tuple[str, ...] = ()
        if frame.lines and frame.module:
            start = address - frame.offset
            names, end = (frame.module.name,), ranges[0].end
        table = self._owners[index].table if inside else None
        if frame.lines and table is not None:
            raw = table.names_at(start)
            names = tuple(name.decode("utf-8", "backslashreplace") for name in raw)
            end = table.symbol_at(start).end
        freed = tuple(clone for clone in self.freed if clone.address in (address, start))
        reason = explain_frame(frame, self.hidden, freed)
        return Explanation(address, frame, section, names, start, end, freed, reason)

    def ksymbols(self) -> tuple[Ksymbol, ...]:
        """Returns the symbols outside modules, with length 0, because kallsyms lists no lengths."""
        return tuple(
            Ksymbol(symbol.start, 0, symbol.name, block.kind)
            for block in self._blocks
            for symbol in map(block.table.symbol, range(len(block.table)))
            if symbol.name
        )

    def without_ksymbols(self) -> Snapshot:
        """Returns a copy without symbols outside modules, for callers that track such symbols."""
        other = copy(self)
        other._blocks = ()  # noqa: SLF001 - a copy of this very class
        return other

    def size_bytes(self) -> int:
        """Returns the size of the symbol tables in bytes."""
        tables = [s.table for s in self._by_name.values()] + [b.table for b in self._blocks]
        sizes = [table.size_bytes() for table in tables if table is not None]
        return sum(sizes) + self.builtin.size_bytes()

    def symbol_count(self) -> int:
        """Returns the number of entries in the symbol tables."""
        tables = [s.table for s in self._by_name.values()] + [b.table for b in self._blocks]
        return sum(len(table) for table in tables if table is not None)

    def _frame_outside(self, address: int, below: int) -> Frame:
        """Builds a frame for an address outside modules.

        ``below`` is the start of the next lower module range.
        """
        vmlinux, init_text = self._by_name.get(VMLINUX), self._init_text
        if vmlinux and init_text and init_text.start <= address < init_text.end:
            # Nothing else is mapped at the init text, so the RVA is valid. The stack of the boot
            # CPU's idle task contains return addresses into the init code that started it.
            module = vmlinux.module
            rva = address - module.base
            builtin = self.builtin.find(address)
            return Frame(module, rva, (), 0, KERNEL_SIDE, Unresolved.FREED_INIT, builtin)
        best: tuple[int, bytes, CodeBlock] | None = None
        for block in self._blocks:
            symbol = block.table.lookup(address)
            if symbol and symbol[1] > below and (best is None or symbol[1] > best[0]):
                best = symbol[1], symbol[0], block
        if best is None:
            reason = Unresolved.HIDDEN if self.hidden else Unresolved.UNMAPPED
            if any(part.start <= address < part.end for part in self._gone):
                reason = Unresolved.MODULE_GONE
            return Frame(None, address, (), 0, KERNEL_SIDE, reason)
        start, name, (kind, table) = best
        module = self._program(kind, table.symbol_at(start))
        offset = address - start
        return Frame(module, offset, (make_line(name),), offset, KERNEL_SIDE)

    def _program(self, kind: ModuleKind, symbol: Symbol) -> Module:
        start = symbol.start
        return self._programs.get(start) or self._programs.setdefault(
            start, make_code_module(kind, symbol)
        )


def make_code_module(kind: ModuleKind, symbol: Symbol, program: BpfProgram | None = None) -> Module:
    """Creates the module that represents a BPF function or trampoline."""
    name, start, end = symbol
    ranges, file_id = (AddressRange(start, end, name),), make_file_id(None, name)
    return Module(name, kind, None, file_id, start, ranges, RangeSource.KERNEL, program=program)


def lookup_addresses(pcs: Sequence[int], *, leaf_exact: bool = True) -> list[int]:
    """Returns the addresses to look up and export for a stack's program counters, leaf first.

    Subtracts 1 from return addresses, which may already belong to the next line or function. No
    other function adjusts addresses. If ``leaf_exact`` is true, the leaf is an exact program
    counter, not a return address.
    """
    addresses = [pc - 1 for pc in pcs]
    if leaf_exact and addresses:
        addresses[0] = pcs[0]
    return addresses


def _disjoint(
    parts: Iterable[tuple[AddressRange, ModuleSymbols]],
) -> list[tuple[AddressRange, ModuleSymbols]]:
    """Returns sorted, disjoint ranges. Where inputs overlap, the later input takes precedence."""
    claims = list(parts)
    edges = sorted({edge for part, _ in claims for edge in (part.start, part.end)})
    order = sorted(range(len(claims)), key=lambda i: claims[i][0].start)
    active: list[int] = []
    regions: list[tuple[AddressRange, ModuleSymbols]] = []
    position = 0
    for start, end in pairwise(edges):
        active = [i for i in active if claims[i][0].end > start]
        while position < len(order) and claims[order[position]][0].start <= start:
            active.append(order[position])
            position += 1
        if active:
            part, owner = claims[max(active)]
            regions.append((AddressRange(start, end, part.name), owner))
    return regions
