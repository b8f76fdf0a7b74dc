"""Combines the sources of function names for user-space binaries."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Protocol

from otel_kprofiler.elf import ElfError, ElfFile, ElfProblem, FileSource, Source, read_sections
from otel_kprofiler.errors import HostError, KProfilerError, describe_error
from otel_kprofiler.host import Access, CacheDirectory, find_cache_path
from otel_kprofiler.model import FileDetails
from otel_kprofiler.symbols.user.budget import ReadingBudget
from otel_kprofiler.symbols.user.build import MAX_SECTION_BYTES, read_functions
from otel_kprofiler.symbols.user.debug_files import (
    DEBUG_DIRECTORIES,
    BuildIdDirectories,
    DebugFile,
    DebugFileFinder,
    DebugLinkDirectories,
    DebugSearch,
    WantedDebugFile,
    find_alternate,
    want_debug_file,
)
from otel_kprofiler.symbols.user.demangle import demangle, demangle_in_go
from otel_kprofiler.symbols.user.file import FileSymbols, LineTable
from otel_kprofiler.symbols.user.functions import FunctionTable
from otel_kprofiler.symbols.user.go import GoLines, find_go_section
from otel_kprofiler.symbols.user.lines_error import LinesError, LinesProblem

MAX_CACHE_BYTES: Final = 2 << 30
"""Size limit for the download cache, and for the source line cache."""
_LINE_MEMORY_BYTES: Final = 4 << 30
_log: Final = logging.getLogger(__name__)
_DEBUG_INFO: Final = b".debug_info"
_MOST_OF_READING: Final = 2 / 3
"""Maximum fraction of the read budget that one file's tables may use."""


class LineReader(Protocol):
    """Reads source lines and inlined functions."""

    def open(self, source: FileSource, path: str, alternate: FileSource | None = None) -> LineTable:
        """Opens the source lines in a file or its debug file. Raises ``KProfilerError`` on failure.

        ``alternate`` is the alternate debug file written by dwz(1).
        """


def find_installed(directories: Sequence[str] = DEBUG_DIRECTORIES) -> tuple[DebugFileFinder, ...]:
    """Returns finders for debug files in directories on this host and in containers."""
    files = Access()
    return BuildIdDirectories(files, directories), DebugLinkDirectories(files, directories)


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolSources:
    """Reads function names from a file and its debug file. Thread-safe.

    Attributes:
        finders: find debug files, in order of preference; None for :func:`find_installed`.
        lines: reads source lines and inlined functions; None to read only function names.
        max_section_bytes: size limit for each section.
        begin_search: called before each search for debug files; returns whether to search.
        budget: memory budget for reading names, one file at a time; no limit by default.
    """

    finders: Sequence[DebugFileFinder] | None = None
    lines: LineReader | None = None
    demangle: Callable[[str], str] = demangle
    max_section_bytes: int = MAX_SECTION_BYTES
    begin_search: Callable[[], bool] = lambda: True
    budget: ReadingBudget = field(default_factory=ReadingBudget)

    @classmethod
    def open(
        cls,
        *,
        lines: bool = False,
        directories: Sequence[str] = DEBUG_DIRECTORIES,
        servers: Sequence[str] = (),
        cache_path: str | None = None,
        line_memory_bytes: int = _LINE_MEMORY_BYTES,
        may_block: bool = True,
    ) -> SymbolSources:
        """Opens the sources that most tools need.

        Args:
            lines: whether to read source lines and inlined functions; requires the ``dwarf``
                extra.
            directories: where to search for debug files, by build id or by path.
            servers: URLs of debuginfod servers.
            cache_path: directory for downloads and source lines; by default the user's cache
                directory.
            line_memory_bytes: memory limit for the process that converts DWARF; at most half of the
                cgroup's available memory.
            may_block: whether lookups of source lines may take seconds; False omits lines in split
                DWARF.

        Raises:
            DependencyError: ``symbolic``, which reads source lines, is not installed.
            HostError: the cache directory cannot be used.
        """
        from otel_kprofiler.symbols.user.debuginfod import Debuginfod  # noqa: PLC0415
        from otel_kprofiler.symbols.user.line_tables import LineTables  # noqa: PLC0415
        from otel_kprofiler.symbols.user.lines import (  # noqa: PLC0415
            ConversionLimits,
            SymbolicLines,
        )

        finders = find_installed(directories)
        if servers:
            finders = (*finders, Debuginfod(servers, _open_cache(cache_path, "debuginfod")))
        if not lines:
            return cls(finders=finders)
        limits = ConversionLimits(memory_bytes=line_memory_bytes)
        symbolic = SymbolicLines(_open_cache(cache_path, "lines"), limits)
        return cls(finders=finders, lines=LineTables(symbolic, use_drgn=may_block))

    def read(
        self, source: Source, elf: ElfFile, details: FileDetails, root: str = ""
    ) -> FileSymbols:
        """Reads a file's symbols. Raises ``KProfilerError`` if the symbols cannot be used.

        The file may be closed afterwards. ``root`` is the root directory of a process that has
        mapped the file; empty for this process's root.
        """
        own = {section.name for section in read_sections(source, elf)}
        with ExitStack() as opened:

            @cache
            def find_debug() -> DebugFile | None:
                wanted = want_debug_file(source, elf, details.path, root)
                found = next(self.find_debug_files(wanted), None)
                if found is not None:
                    opened.callback(found.close)
                return found

            limit, budget = self.max_section_bytes, self.budget
            with budget.reading():
                functions = read_functions(source, elf, find_debug, max_bytes=limit, budget=budget)
            lines, failed = self._open_lines(source, elf, details.path, root, functions)
            is_elsewhere = self.lines is not None and _DEBUG_INFO not in own
            debug = find_debug() if lines is None and is_elsewhere else None
            if debug is not None:
                file, headers, path = debug.source, debug.elf, debug.path
                lines, failed = self._open_lines(file, headers, path, root, functions)
        problem, may_pass = (failed.problem, failed.may_pass) if failed else (None, False)
        naming = demangle_in_go if elf.is_go and self.demangle is demangle else self.demangle
        return FileSymbols(functions, naming, lines, problem, can_retry_lines=may_pass)

    def find_debug_files(self, wanted: WantedDebugFile) -> Iterator[DebugFile]:
        """Yields open debug files from each finder in turn. The caller closes each file."""
        if not self.begin_search():
            return
        for finder in find_installed() if self.finders is None else self.finders:
            yield from finder.find(wanted)

    def _open_lines(
        self, source: Source, elf: ElfFile, path: str, root: str, functions: FunctionTable
    ) -> tuple[LineTable | None, LinesError | None]:
        if self.lines is None or not isinstance(source, FileSource):
            return None, None
        sections = read_sections(source, elf)
        go = find_go_section(sections)
        try:
            if any(section.name == _DEBUG_INFO for section in sections):
                return self._open_dwarf(self.lines, source, elf, path, root), None
            if go is None:
                return None, None
            with self.budget.reading():
                self.budget.take(functions.nbytes, "its functions")
                table = GoLines(source, elf, sections, go, self.budget)
            if functions.nbytes + table.nbytes <= self.budget.limit_bytes * _MOST_OF_READING:
                return table, None
            table.close()
            detail = f"the Go line table takes {table.nbytes >> 20} MiB, more than the limit"
            raise ElfError(ElfProblem.TOO_LARGE, detail)
        except (
            KProfilerError,
            OSError,
        ) as error:  # function names are useful even without line numbers
            _log.info("no source lines for %s: %s", path, describe_error(error))
            return None, _as_lines_error(error)

    def _open_dwarf(
        self, reader: LineReader, source: FileSource, elf: ElfFile, path: str, root: str
    ) -> LineTable:
        search = DebugSearch(root, self.begin_search)
        debug = DebugFile(path, source.fd, source, elf)
        alternate = find_alternate(debug, Access(), search=search)
        try:
            shared = alternate.source if alternate else None
            return reader.open(source, path, shared if isinstance(shared, FileSource) else None)
        finally:
            if alternate is not None:
                alternate.close()


def _open_cache(path: str | None, name: str) -> CacheDirectory:
    parent = path or find_cache_path(os.environ, os.geteuid())
    hint = "set XDG_CACHE_HOME to a directory that only this user can write"
    if parent is None:
        raise HostError("no cache directory is available for downloads and source lines", hint=hint)
    try:
        return CacheDirectory(os.path.join(parent, name), MAX_CACHE_BYTES)
    except OSError as error:
        text = f"cannot use {parent} for downloads and source lines: {error.strerror}"
        raise HostError(text, hint=hint) from error


def _as_lines_error(error: KProfilerError | OSError) -> LinesError:
    if isinstance(error, LinesError):
        return error
    is_large = isinstance(error, ElfError) and error.problem is ElfProblem.TOO_LARGE
    problem = LinesProblem.TOO_LARGE if is_large else LinesProblem.DAMAGED
    return LinesError(describe_error(error), problem, may_pass=isinstance(error, OSError))
