"""Finds a user-space binary's debug file by build id, or by name and checksum.

Candidates are verified by build id, or by checksum if the file has no build id.
"""

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from otel_kprofiler.elf import (
    ElfError,
    ElfFile,
    FileSource,
    Section,
    Source,
    read_content,
    read_debug_elf,
    read_sections,
)
from otel_kprofiler.host import ReferableFiles, open_regular
from otel_kprofiler.model import BuildId

DEBUG_DIRECTORIES: Final = ("/usr/lib/debug",)
MAX_SUMMED_BYTES: Final = 1 << 30
"""Maximum size of a file whose checksum is computed. A checksum takes about 0.5 s per GiB."""
_LINK: Final = b".gnu_debuglink"
_ALTERNATE_LINK: Final = b".gnu_debugaltlink"
_MAX_LINK_BYTES: Final = 8192
_CRC: Final = struct.Struct("<I")
_PART_BYTES: Final = 1 << 20
_log: Final = logging.getLogger(__name__)


class DebugLink(NamedTuple):
    """The content of ``.gnu_debuglink``: name of the debug file, and its CRC-32."""

    name: str
    crc: int


class WantedDebugFile(NamedTuple):
    """Search keys for a file's debug file.

    Attributes:
        path: path of the file, as seen by the process that uses the file.
        root: root directory of the process, such as ``/proc/PID/root``; empty for the root
            directory of the calling process.
    """

    path: str
    root: str
    build_id: BuildId | None
    debug_link: DebugLink | None


class DebugSearch(NamedTuple):
    """A search for a file's debug file.

    ``begin`` is called before the search, and returns whether to search. The search may hang in
    directories owned by users. For ``root``, see :class:`WantedDebugFile`.
    """

    root: str = ""
    begin: Callable[[], bool] = lambda: True


HOST_SEARCH: Final = DebugSearch()


class DebugFile(NamedTuple):
    """An open debug file, which its recipient must close."""

    path: str
    fd: int
    source: Source
    elf: ElfFile

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


class DebugFileFinder(Protocol):
    """Finds debug files."""

    def find(self, wanted: WantedDebugFile) -> Iterator[DebugFile]:
        """Yields open, verified candidates, best first. The caller must close each candidate."""


def want_debug_file(source: Source, elf: ElfFile, path: str, root: str = "") -> WantedDebugFile:
    """Returns the search keys for a debug file. Raises ``ElfError`` if a header is malformed."""
    content = _read_small(source, read_sections(source, elf), _LINK)
    return WantedDebugFile(path, root, elf.build_id, parse_debug_link(content))


def parse_debug_link(content: bytes) -> DebugLink | None:
    """Parses ``.gnu_debuglink``; None if it is malformed, or the name is not a plain file name.

    The section contains a name, a zero byte, padding to a multiple of four bytes, and a CRC-32 (GDB
    manual, "Separate Debug Files").
    """
    name, _, _ = content.partition(b"\0")
    at = (len(name) + _CRC.size) & -_CRC.size
    if not name or b"/" in name or name in (b".", b"..") or at + _CRC.size > len(content):
        return None
    return DebugLink(os.fsdecode(name), *_CRC.unpack_from(content, at))


class BuildIdDirectories:
    """Finds debug files by build id: ``DIRECTORY/.build-id/xx/….debug``.

    Directories are searched first below ``WantedDebugFile.root``, then below this process's root.
    """

    def __init__(
        self, files: ReferableFiles, directories: Sequence[str] = DEBUG_DIRECTORIES
    ) -> None:
        self._files, self._directories = files, tuple(directories)

    def find(self, wanted: WantedDebugFile) -> Iterator[DebugFile]:
        """Opens and yields files that match the build id in both name and content."""
        build_id = wanted.build_id
        if build_id:
            name = f".build-id/{build_id[:2]}/{build_id[2:]}.debug"
            for root in dict.fromkeys((wanted.root, "")):
                for directory in self._directories:
                    path = f"{directory}/{name}"
                    yield from _open_same(self._files, root, path, build_id, None)


class DebugLinkDirectories:
    """Finds debug files by ``.gnu_debuglink``, in the directories that debuggers search.

    ``directories`` contain debug files, at the same relative paths as the original files. The
    directories are searched first below ``WantedDebugFile.root``, then below this process's root.
    """

    def __init__(
        self, files: ReferableFiles, directories: Sequence[str] = DEBUG_DIRECTORIES
    ) -> None:
        self._files, self._directories = files, tuple(directories)

    def find(self, wanted: WantedDebugFile) -> Iterator[DebugFile]:
        """Opens and yields files with the link's name and the expected build id or checksum."""
        if wanted.debug_link is None or not wanted.path.startswith("/"):
            return
        name, crc = wanted.debug_link
        for root in dict.fromkeys((wanted.root, "")):
            path = _path_below(self._files, root, wanted.path)
            directory_of_file = os.path.dirname(path).rstrip("/")
            below = [f"{directory}{directory_of_file}" for directory in self._directories]
            for folder in (directory_of_file, f"{directory_of_file}/.debug", *below):
                path = f"{folder}/{name}"
                yield from _open_same(self._files, root, path, wanted.build_id, crc)


def find_alternate(
    debug: DebugFile, files: ReferableFiles, search: DebugSearch = HOST_SEARCH
) -> DebugFile | None:
    """Opens the alternate debug file written by dwz(1); None if there is no such file.

    Raises ``ElfError`` if the section headers of ``debug`` are malformed.
    """
    content = _read_small(debug.source, read_sections(debug.source, debug.elf), _ALTERNATE_LINK)
    name, _, build_id = content.partition(b"\0")
    if not name or not build_id or not search.begin():
        return None
    root = search.root
    wanted = BuildId(build_id.hex())
    directory = os.path.dirname(debug.path.removeprefix(root))
    path = os.path.join(directory, os.fsdecode(name))
    for place in dict.fromkeys((root, "")):
        for alternate in _open_same(files, place, path, wanted, None):
            return alternate
    by_id = BuildIdDirectories(files).find(WantedDebugFile(debug.path, root, wanted, None))
    return next(by_id, None)


def _read_small(source: Source, sections: list[Section], name: bytes) -> bytes:
    section = next((entry for entry in sections if entry.name == name), None)
    if section is None or section.size > _MAX_LINK_BYTES:
        return b""
    return read_content(source, section, _MAX_LINK_BYTES)


def _path_below(files: ReferableFiles, root: str, path: str) -> str:
    """Returns a path relative to a process's root directory."""
    try:
        above = files.read_link(root).rstrip("/") if root else ""
    except OSError:  # the process has exited, or root is not a link
        return path
    return path.removeprefix(above) if path.startswith(f"{above}/") else path


def _open_same(
    files: ReferableFiles, root: str, path: str, build_id: BuildId | None, crc: int | None
) -> Iterator[DebugFile]:
    try:
        fd, size, _ = open_regular(files, path, root)
    except OSError as error:
        _log.debug("cannot open a debug file: %s", error)
        return
    kept = False
    try:
        source = FileSource(fd, size)
        elf = read_debug_elf(source)
        if elf.build_id == build_id if build_id else _crc(source) == crc:
            kept = True
            yield DebugFile(root + path, fd, source, elf)
        else:
            _log.debug("%s belongs to another executable or library", path)
    except ElfError as error:
        _log.debug("%s is not a debug file: %s", path, error)
    finally:
        if not kept:
            os.close(fd)


def _crc(source: Source) -> int | None:
    if source.size > MAX_SUMMED_BYTES:
        return None
    value = 0
    for at in range(0, source.size, _PART_BYTES):
        value = zlib.crc32(source.read(at, min(_PART_BYTES, source.size - at)), value)
    return value
