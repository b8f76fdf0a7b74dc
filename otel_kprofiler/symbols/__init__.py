"""Kernel symbols: runtime addresses to modules, relative addresses and function names.

Usable alone, on this host or on captured files::

    from otel_kprofiler.symbols import Symbolizer

    symbolizer = Symbolizer.live()
    for match in symbolizer.find("vfs_read"):
        print(hex(match.address), match.module, hex(match.rva))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_kprofiler.symbols.captured import CapturedFiles
from otel_kprofiler.symbols.kernel.archive import ReadingPacker, ReadingUnpacker
from otel_kprofiler.symbols.kernel.bpf import CodeSource, CodeTable
from otel_kprofiler.symbols.kernel.explain import Explanation
from otel_kprofiler.symbols.kernel.hidden import HiddenCause
from otel_kprofiler.symbols.kernel.identity import make_file_id
from otel_kprofiler.symbols.kernel.kallsyms import FreedSymbol, Kallsyms, parse_kallsyms
from otel_kprofiler.symbols.kernel.load import read_snapshot
from otel_kprofiler.symbols.kernel.notes import Note, find_build_id, parse_notes
from otel_kprofiler.symbols.kernel.snapshot import Match, ModuleSymbols, Snapshot
from otel_kprofiler.symbols.kernel.table import Symbol, SymbolTable
from otel_kprofiler.symbols.kernel.timeline import LoadedModule, ModuleReading, ModuleSource
from otel_kprofiler.symbols.kernel.uevents import (
    ModuleAction,
    ModuleEvent,
    ModuleEvents,
    NoEvents,
    parse_uevent,
)
from otel_kprofiler.symbols.kernel.watch import ModuleWatch
from otel_kprofiler.symbols.symbolizer import Symbolizer

if TYPE_CHECKING:
    from otel_kprofiler.symbols.elf.functions import ElfMatch, ElfSymbols

__all__ = [
    "CapturedFiles",
    "CodeSource",
    "CodeTable",
    "ElfMatch",
    "ElfSymbols",
    "Explanation",
    "FreedSymbol",
    "HiddenCause",
    "Kallsyms",
    "LoadedModule",
    "Match",
    "ModuleAction",
    "ModuleEvent",
    "ModuleEvents",
    "ModuleReading",
    "ModuleSource",
    "ModuleSymbols",
    "ModuleWatch",
    "NoEvents",
    "Note",
    "ReadingPacker",
    "ReadingUnpacker",
    "Snapshot",
    "Symbol",
    "SymbolTable",
    "Symbolizer",
    "find_build_id",
    "make_file_id",
    "parse_kallsyms",
    "parse_notes",
    "parse_uevent",
    "read_snapshot",
]


def __getattr__(name: str) -> object:
    if name in {"ElfMatch", "ElfSymbols"}:
        # elftools, which only readers of ELF files need
        from otel_kprofiler.symbols.elf import functions  # noqa: PLC0415

        return getattr(functions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
