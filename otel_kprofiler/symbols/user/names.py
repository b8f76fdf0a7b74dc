"""Defines the settings for naming user code, and opens a loader with these settings."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from otel_kprofiler.clock import Clock
from otel_kprofiler.elf import FileSource, ImageSource, Source, read_elf
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.host import Access
from otel_kprofiler.model import FileDetails, OpenFile
from otel_kprofiler.symbols.user.budget import ReadingBudget
from otel_kprofiler.symbols.user.debug_files import HOST_SEARCH, DebugSearch
from otel_kprofiler.symbols.user.file import FileSymbols
from otel_kprofiler.symbols.user.jit_code import ProcessCode
from otel_kprofiler.symbols.user.jit_names import JitNames
from otel_kprofiler.symbols.user.loader import (
    DEFAULT_CPU_SHARE,
    DEFAULT_MAX_BYTES,
    CodeSink,
    SymbolLoader,
)
from otel_kprofiler.symbols.user.loader_files import SymbolsRefused
from otel_kprofiler.symbols.user.reopening import reopen
from otel_kprofiler.symbols.user.sources import SymbolSources

MAX_FILE_BYTES: Final = 1 << 30
_LINE_SHARE: Final = 8
"""Memory limit for a process that converts DWARF, as a multiple of ``max_bytes``."""
_WORKERS: Final = {"names": 1, "lines": 2}  # converting DWARF takes seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSymbolSettings:
    """Settings for resolving user frames to functions and lines.

    Attributes:
        detail: which details to read; ``lines`` also includes names and inlined functions.
        max_bytes: memory limit for symbols. Reading a file may use up to three quarters of the
            limit. Large tables are evicted to free memory. A process that converts DWARF may use
            eight times this limit, but at most half of the cgroup's available memory.
        cpu_share: fraction of one CPU for reading symbols, in CPU seconds per second.
        may_block: whether lookups may take seconds; False omits source lines in split DWARF.
    """

    detail: Literal["off", "names", "lines"] = "off"
    max_bytes: int = DEFAULT_MAX_BYTES
    cpu_share: float = DEFAULT_CPU_SHARE
    may_block: bool = False


def open_user_names(
    settings: UserSymbolSettings, code_sink: CodeSink | None = None
) -> SymbolLoader | None:
    """Opens the loader that names user frames; None if disabled. The caller closes the loader.

    Raises ``DependencyError`` if the package symbolic, which reads source lines, is not installed.
    """
    if settings.detail == "off":
        return None
    sources = SymbolSources()
    if settings.detail == "lines":
        sources = SymbolSources.open(
            lines=True,
            line_memory_bytes=_LINE_SHARE * settings.max_bytes,
            may_block=settings.may_block,
        )
    budget = ReadingBudget(settings.max_bytes * 3 // 4)
    sources = replace(sources, max_section_bytes=settings.max_bytes, budget=budget)
    access, clock = Access(), Clock()
    code = JitNames(lambda key: ProcessCode(key, access, clock), clock.boot_ns)
    return SymbolLoader(
        partial(read_names, sources),
        code=code,
        code_sink=code_sink,
        reopen=lambda wanted: reopen(wanted, access),
        max_bytes=settings.max_bytes,
        budget=budget,
        cpu_share=settings.cpu_share,
        workers=_WORKERS[settings.detail],
    )


def read_names(
    sources: SymbolSources,
    details: FileDetails,
    content: OpenFile | bytes,
    search: DebugSearch = HOST_SEARCH,
) -> FileSymbols:
    """Reads the symbol names in an open file or an in-memory image.

    Raises ``SymbolsRefused`` if the file is too large, malformed, or not an ELF file.
    """
    source = _open(content)
    sources = replace(sources, begin_search=search.begin)
    try:
        return sources.read(source, read_elf(source, None), details, search.root)
    except KProfilerError as error:
        raise SymbolsRefused(str(error)) from error


def _open(content: OpenFile | bytes) -> Source:
    if isinstance(content, bytes):
        return ImageSource(content)
    if content.size > MAX_FILE_BYTES:
        limit = MAX_FILE_BYTES >> 20
        size = content.size >> 20
        raise SymbolsRefused(f"the file is {size:,} MiB, more than the limit of {limit:,} MiB")
    return FileSource(content.fd, content.size)
