"""Kernel symbols: runtime addresses to modules, relative addresses and function names.

Usable alone, on this host or on captured files::

    from otel_kprofiler.symbols import Symbolizer

    symbolizer = Symbolizer.live()
    for match in symbolizer.find("vfs_read"):
        print(hex(match.address), match.module, hex(match.rva))

A :class:`StackResolver` resolves samples, each side of their stacks by its :class:`SideResolver`:
the kernel's by a :class:`Symbolizer`, user frames by what the caller provides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_kprofiler.symbols.cache import BoundedCache
from otel_kprofiler.symbols.captured import CapturedFiles
from otel_kprofiler.symbols.kernel.archive import ReadingPacker, ReadingUnpacker
from otel_kprofiler.symbols.kernel.bpf import KsymbolSource, KsymbolTable
from otel_kprofiler.symbols.kernel.explain import Explanation
from otel_kprofiler.symbols.kernel.hidden import HiddenCause
from otel_kprofiler.symbols.kernel.identity import make_file_id
from otel_kprofiler.symbols.kernel.kallsyms import FreedSymbol, Kallsyms, parse_kallsyms
from otel_kprofiler.symbols.kernel.load import PROC_KALLSYMS, read_snapshot
from otel_kprofiler.symbols.kernel.loaded import (
    LOADING,
    FoundModule,
    LineCollector,
    add_names,
    make_found,
)
from otel_kprofiler.symbols.kernel.modules import (
    PROC_MODULES,
    ModuleFiles,
    ProcModule,
    parse_modules,
    read_module,
    taken_pages,
)
from otel_kprofiler.symbols.kernel.notes import Note, find_build_id, parse_notes
from otel_kprofiler.symbols.kernel.read import read_pieces
from otel_kprofiler.symbols.kernel.snapshot import (
    VMLINUX,
    Match,
    ModuleSymbols,
    Snapshot,
    lookup_addresses,
)
from otel_kprofiler.symbols.kernel.table import Symbol, SymbolTable
from otel_kprofiler.symbols.kernel.timeline import (
    FOREVER,
    LoadedModule,
    ModuleCounts,
    ModuleReading,
    ModuleSource,
    Removal,
)
from otel_kprofiler.symbols.resolver import RawAddresses, SideResolver, StackResolver
from otel_kprofiler.symbols.symbolizer import Symbolizer
from otel_kprofiler.symbols.user import UserResolver

if TYPE_CHECKING:
    from otel_kprofiler.symbols.elf.functions import ElfMatch, ElfSymbols


__all__ = [
    "FOREVER",
    "LOADING",
    "PROC_KALLSYMS",
    "PROC_MODULES",
    "VMLINUX",
    "BoundedCache",
    "CapturedFiles",
    "ElfMatch",
    "ElfSymbols",
    "Explanation",
    "FoundModule",
    "FreedSymbol",
    "HiddenCause",
    "Kallsyms",
    "KsymbolSource",
    "KsymbolTable",
    "LineCollector",
    "LoadedModule",
    "Match",
    "ModuleCounts",
    "ModuleFiles",
    "ModuleReading",
    "ModuleSource",
    "ModuleSymbols",
    "Note",
    "ProcModule",
    "RawAddresses",
    "ReadingPacker",
    "ReadingUnpacker",
    "Removal",
    "SideResolver",
    "Snapshot",
    "StackResolver",
    "Symbol",
    "SymbolTable",
    "Symbolizer",
    "UserResolver",
    "add_names",
    "find_build_id",
    "lookup_addresses",
    "make_file_id",
    "make_found",
    "parse_kallsyms",
    "parse_modules",
    "parse_notes",
    "read_module",
    "read_pieces",
    "read_snapshot",
    "taken_pages",
]


def __getattr__(name: str) -> object:
    if name in {"ElfMatch", "ElfSymbols"}:
        # Imports elftools, which only ELF readers need.
        from otel_kprofiler.symbols.elf import functions  # noqa: PLC0415

        return getattr(functions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
