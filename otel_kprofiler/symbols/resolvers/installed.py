"""Resolves addresses in files that a profile identifies only by name and build id or file hash."""

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from otel_kprofiler.elf import (
    ElfError,
    ElfFile,
    FileSource,
    ImageSource,
    Source,
    hash_file,
    read_elf,
)
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.host import (
    Access,
    ReferableFiles,
    find_vdso,
    open_regular,
    parse_mappings,
    read_maps,
)
from otel_kprofiler.model import VDSO_NAME, BuildId, FileDetails, FileId, Frame
from otel_kprofiler.symbols.resolvers.files import CodeFile, read_code_file
from otel_kprofiler.symbols.user.debug_files import WantedDebugFile
from otel_kprofiler.symbols.user.sources import SymbolSources

DIRECTORIES: Final = ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64", "/usr/local", "/opt")
MAX_FILES_LISTED: Final = 1_000_000


class FileIdentity(NamedTuple):
    """Identifies a file across hosts. An unknown id is empty. The name excludes directories.

    ``path`` is the file's absolute path on the profiled host, which is searched first; empty if
    unknown.
    """

    name: str
    build_id: BuildId
    file_id: FileId
    path: str = ""


class InstalledFiles:
    """Finds a profile's files on this host: by build id; otherwise, by hash. Not thread-safe.

    Candidates are the file at the path on the profiled host, the files at ``paths``, files with the
    same name below ``directories`` (by default :data:`DIRECTORIES`) or mapped by a process, and
    debug files with the build id.
    """

    def __init__(
        self,
        sources: SymbolSources,
        paths: Iterable[str] = (),
        directories: Iterable[str] | None = None,
        files: ReferableFiles | None = None,
    ) -> None:
        self._sources = sources
        self._given = tuple(paths)
        self._directories = tuple(DIRECTORIES if directories is None else directories)
        self._files = files or Access()
        self._mapped: Mapping[str, list[str]] | None = None
        self._installed: Mapping[str, list[str]] | None = None
        self._found: dict[FileIdentity, CodeFile | None] = {}

    def find(self, wanted: FileIdentity) -> CodeFile | None:
        """Returns a file's code; None if no file on this host has the requested identity."""
        if wanted not in self._found:
            code = self._find_file(wanted)
            self._found[wanted] = code or self._find_debug_file(wanted)
        return self._found[wanted]

    def frame(self, wanted: FileIdentity, address: int, offset: int | None) -> Frame | None:
        """Returns the frame at an address (SVMA) in a file; None if no file on this host matches.

        If given, ``offset`` (a file offset) takes precedence over ``address``.
        """
        code = self.find(wanted)
        if code is None:
            return None
        svma = None if offset is None else code.find_address(offset)
        return code.frame(address if svma is None else svma)

    def _find_file(self, wanted: FileIdentity) -> CodeFile | None:
        if wanted.name == VDSO_NAME:
            image = find_vdso(self._files)
            return None if image is None else self._read_source(ImageSource(image), wanted)
        for path in self._candidates(wanted.name, wanted.path):
            code = self._read(path, wanted)
            if code is not None:
                return code
        return None

    def _candidates(self, name: str, path: str) -> Iterator[str]:
        """Yields candidate paths; lists directories at most once, and only if needed."""
        if path:
            yield path
        yield from self._given
        if self._mapped is None:
            self._mapped = _by_name(self._list_mapped())
        yield from self._mapped.get(name, ())
        if self._installed is None:
            self._installed = _by_name(self._list_installed())
        yield from self._installed.get(name, ())

    def _list_mapped(self) -> Iterator[str]:
        for entry in self._files.list_dir("/proc"):
            if entry.isdigit():
                try:
                    maps = read_maps(self._files, entry)
                except OSError:  # the process has exited, or is hidden
                    continue
                for mapping in parse_mappings(maps):
                    if mapping.is_executable and mapping.inode:
                        yield mapping.path

    def _list_installed(self) -> Iterator[str]:
        for directory in self._directories:
            for folder, _, names in os.walk(directory):
                for name in names:
                    yield os.path.join(folder, name)

    def _read(self, path: str, wanted: FileIdentity) -> CodeFile | None:
        try:
            fd, size, _ = open_regular(self._files, path)
        except OSError:
            return None
        try:
            return self._read_source(FileSource(fd, size), wanted, path)
        finally:
            os.close(fd)

    def _read_source(self, source: Source, wanted: FileIdentity, path: str = "") -> CodeFile | None:
        try:
            if _is_wanted(source, read_elf(source, None), wanted):
                return read_code_file(source, path or wanted.name, self._sources)
        except ElfError:
            pass
        return None

    def _find_debug_file(self, wanted: FileIdentity) -> CodeFile | None:
        """Returns the code of a file that is not on this host, with names from its debug file."""
        if not wanted.build_id:
            return None
        for debug in self._sources.find_debug_files(WantedDebugFile("", "", wanted.build_id, None)):
            try:
                details = FileDetails(wanted.name, wanted.build_id, wanted.file_id)
                return CodeFile(details, (), self._sources.read(debug.source, debug.elf, details))
            except KProfilerError:
                continue
            finally:
                debug.close()
        return None


def _by_name(paths: Iterator[str]) -> Mapping[str, list[str]]:
    paths_by_name: dict[str, dict[str, None]] = {}
    for path in islice(paths, MAX_FILES_LISTED):
        paths_by_name.setdefault(os.path.basename(path), {})[path] = None
    return {name: list(places) for name, places in paths_by_name.items()}


def _is_wanted(source: Source, elf: ElfFile, wanted: FileIdentity) -> bool:
    if wanted.build_id:
        return elf.build_id == wanted.build_id
    return bool(wanted.file_id) and hash_file(source) == wanted.file_id
