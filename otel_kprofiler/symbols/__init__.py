"""Resolves kernel and user addresses to modules, file addresses, functions and lines.

The package can be used as a library, on this host or on captured files::

    from otel_kprofiler.symbols import KernelSymbolizer

    symbolizer = KernelSymbolizer.live()
    for match in symbolizer.find("vfs_read"):
        print(hex(match.address), match.module, hex(match.rva))

A :class:`StackResolver` resolves samples, using one :class:`SideResolver` each for the kernel
(:class:`KernelSymbolizer`), Python (:class:`PythonResolver`) and native user code
(:class:`UserResolver`). A :class:`SymbolLoader` finds the names of user functions. A
:class:`Symbolizer` resolves single addresses, kernel or user.
"""

from typing import TYPE_CHECKING, Final

from otel_kprofiler.late import late_names
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
from otel_kprofiler.symbols.kernel.read import read_pieces
from otel_kprofiler.symbols.kernel.snapshot import (
    VMLINUX,
    Match,
    ModuleSymbols,
    Snapshot,
    lookup_addresses,
)
from otel_kprofiler.symbols.kernel.symbolizer import KernelSymbolizer
from otel_kprofiler.symbols.kernel.table import Symbol, SymbolTable
from otel_kprofiler.symbols.kernel.timeline import (
    FOREVER,
    LoadedModule,
    ModuleCounts,
    ModuleReading,
    ModuleSource,
    Removal,
)
from otel_kprofiler.symbols.python.interleave import Interleaver
from otel_kprofiler.symbols.python.resolver import PythonResolver
from otel_kprofiler.symbols.resolution import Resolution, Resolver
from otel_kprofiler.symbols.resolver import (
    RawAddresses,
    SideResolver,
    StackResolver,
    VariableSide,
)
from otel_kprofiler.symbols.user.file import NamedAddress
from otel_kprofiler.symbols.user.loader import CodeSink, SymbolLoader
from otel_kprofiler.symbols.user.names import UserSymbolSettings, open_user_names
from otel_kprofiler.symbols.user.resolver import UserNames, UserResolver

if TYPE_CHECKING:
    from otel_kprofiler.symbols.kernel.elf_functions import ElfMatch, ElfSymbols
    from otel_kprofiler.symbols.kernel.file_kind import is_kernel_file
    from otel_kprofiler.symbols.resolvers.combined import CachedResolver, ChainResolver, PidFilter
    from otel_kprofiler.symbols.resolvers.elf_file import ElfResolver
    from otel_kprofiler.symbols.resolvers.installed import FileIdentity, InstalledFiles
    from otel_kprofiler.symbols.resolvers.installed_kernel import InstalledKernel
    from otel_kprofiler.symbols.resolvers.kernel import KernelResolver
    from otel_kprofiler.symbols.resolvers.process import (
        ProcessesResolver,
        ProcessResolver,
        find_process,
    )
    from otel_kprofiler.symbols.symbolizer import Symbolizer
    from otel_kprofiler.symbols.user.debug_files import (
        DEBUG_DIRECTORIES,
        BuildIdDirectories,
        DebugFile,
        DebugFileFinder,
        DebugLinkDirectories,
        WantedDebugFile,
    )
    from otel_kprofiler.symbols.user.debuginfod import Debuginfod, find_servers
    from otel_kprofiler.symbols.user.demangle import demangle
    from otel_kprofiler.symbols.user.line_tables import LineTables
    from otel_kprofiler.symbols.user.lines import SymbolicLines
    from otel_kprofiler.symbols.user.sources import SymbolSources


__all__ = [
    "DEBUG_DIRECTORIES",
    "FOREVER",
    "LOADING",
    "PROC_KALLSYMS",
    "PROC_MODULES",
    "VMLINUX",
    "BoundedCache",
    "BuildIdDirectories",
    "CachedResolver",
    "CapturedFiles",
    "ChainResolver",
    "CodeSink",
    "DebugFile",
    "DebugFileFinder",
    "DebugLinkDirectories",
    "Debuginfod",
    "ElfMatch",
    "ElfResolver",
    "ElfSymbols",
    "Explanation",
    "FileIdentity",
    "FoundModule",
    "FreedSymbol",
    "HiddenCause",
    "InstalledFiles",
    "InstalledKernel",
    "Interleaver",
    "Kallsyms",
    "KernelResolver",
    "KernelSymbolizer",
    "KsymbolSource",
    "KsymbolTable",
    "LineCollector",
    "LineTables",
    "LoadedModule",
    "Match",
    "ModuleCounts",
    "ModuleFiles",
    "ModuleReading",
    "ModuleSource",
    "ModuleSymbols",
    "NamedAddress",
    "PidFilter",
    "ProcModule",
    "ProcessResolver",
    "ProcessesResolver",
    "PythonResolver",
    "RawAddresses",
    "ReadingPacker",
    "ReadingUnpacker",
    "Removal",
    "Resolution",
    "Resolver",
    "SideResolver",
    "Snapshot",
    "StackResolver",
    "Symbol",
    "SymbolLoader",
    "SymbolSources",
    "SymbolTable",
    "SymbolicLines",
    "Symbolizer",
    "UserNames",
    "UserResolver",
    "UserSymbolSettings",
    "VariableSide",
    "WantedDebugFile",
    "add_names",
    "demangle",
    "find_process",
    "find_servers",
    "is_kernel_file",
    "lookup_addresses",
    "make_file_id",
    "make_found",
    "open_user_names",
    "parse_kallsyms",
    "parse_modules",
    "read_module",
    "read_pieces",
    "read_snapshot",
    "taken_pages",
]


_LATE: Final = {
    "kernel.elf_functions": "ElfMatch ElfSymbols",
    "kernel.file_kind": "is_kernel_file",
    "resolvers.combined": "CachedResolver ChainResolver PidFilter",
    "resolvers.elf_file": "ElfResolver",
    "resolvers.installed": "FileIdentity InstalledFiles",
    "resolvers.installed_kernel": "InstalledKernel",
    "resolvers.kernel": "KernelResolver",
    "resolvers.process": "ProcessResolver ProcessesResolver find_process",
    "symbolizer": "Symbolizer",
    "user.debug_files": (
        "BuildIdDirectories DEBUG_DIRECTORIES DebugFile DebugFileFinder DebugLinkDirectories "
        "WantedDebugFile"
    ),
    "user.debuginfod": "Debuginfod find_servers",
    "user.demangle": "demangle",
    "user.line_tables": "LineTables",
    "user.lines": "SymbolicLines",
    "user.sources": "SymbolSources",
}
"""Names that are imported on first use, because sampling does not need them."""

__getattr__ = late_names(__name__, _LATE)
