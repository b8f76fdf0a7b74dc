"""Converts a request into tables that can be copied into a BPF map."""

import functools
import logging
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from otel_kprofiler.elf import (
    MACHINES,
    ElfError,
    ElfFile,
    ElfProblem,
    FileSource,
    ImageSource,
    Source,
    find_section,
    hash_file,
    read_elf,
)
from otel_kprofiler.host import (
    FilePlaces,
    FileRequest,
    OpenedFile,
    ReferableFiles,
    find_vdso,
    open_mapped,
)
from otel_kprofiler.model import VDSO_NAME, FileDetails, KnownFiles
from otel_kprofiler.stopping import reading
from otel_kprofiler.unwinding.gaps import find_gaps
from otel_kprofiler.unwinding.image import check_texts, image_pages, write_image
from otel_kprofiler.unwinding.indexing import Children, index_code, index_frames, index_go
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused, refusing
from otel_kprofiler.unwinding.request import VDSO
from otel_kprofiler.unwinding.table import Tables, find_tables
from otel_kprofiler.unwinding.vdso_frames import make_vdso_tables


class MakeTables(Protocol):
    """Builds tables in a child process."""

    def __call__(self, *, children: Children) -> Tables:
        """Generate the tables in a child process, which ``children`` runs."""


Index = Callable[[MakeTables], Tables]

_FRAMES: Final = b".eh_frame"
_TEXT: Final = b".text"
_GO_TABLES: Final = (b".gopclntab", b".data.rel.ro.gopclntab")

_log = logging.getLogger(__name__)


class LoadableTables:
    """The verified unwind tables for an open file."""

    def __init__(
        self, source: Source, tables: Tables, elf: ElfFile, opened: OpenedFile | None
    ) -> None:
        self._source, self._tables, self._elf, self._opened = source, tables, elf, opened
        self.pages = image_pages(tables)

    def fill(self, target: memoryview, serial: int) -> None:
        """Copy the tables into ``target``. Raises :class:`TableRefused` if the file has changed."""
        with refusing():
            write_image(target, self._source, self._tables, self._elf, serial)
        if self._opened is not None:
            _check_unchanged(self._opened)


class Code(NamedTuple):
    """The requested file, with its ELF headers; ``file`` is None for the vDSO."""

    source: Source
    elf: ElfFile
    file: OpenedFile | None

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()


def open_code(
    request: FileRequest, files: ReferableFiles, known_files: KnownFiles, places: FilePlaces
) -> Code:
    """Open the requested file, and record its path, hash and build id in ``known_files``.

    Raises :class:`TableRefused` if the file cannot be opened, or is not an ELF file. A readable
    file is recorded even if it is not an ELF file.
    """
    with refusing():
        if request.key == VDSO:
            return _open_vdso(files, known_files, request.tgid)
        details = known_files.get(request.key)
        opened = open_mapped(request, files, details.path if details else "", places.find)
        try:
            places.add(opened.path)
            with reading(opened.path):
                return _read_headers(request, opened, known_files)
        except BaseException:
            opened.close()
            raise


def _open_vdso(files: ReferableFiles, known_files: KnownFiles, tgid: int) -> Code:
    code = find_vdso(files)
    if code is None:
        raise TableRefused(Refusal.GONE, "this process has no vDSO")
    image = ImageSource(code)
    elf = read_elf(image)
    details = FileDetails(VDSO_NAME, elf.build_id, hash_file(image), elf.texts)
    known_files.add(VDSO, details, code, tgid)
    return Code(image, elf, None)


def _read_headers(request: FileRequest, opened: OpenedFile, known_files: KnownFiles) -> Code:
    source = FileSource(opened.fd, opened.status.st_size)
    details = FileDetails(opened.path, None, hash_file(source), (), opened.deleted)
    try:
        elf = read_elf(source)
    except ElfError:
        _check_unchanged(opened)
        known_files.add(request.key, details)
        raise
    details = details._replace(build_id=elf.build_id, texts=elf.texts, is_go=elf.is_go)
    # if the file has changed, the build id may belong to newer content
    _check_unchanged(opened)
    known_files.add(request.key, details, opened.content, request.tgid)
    return Code(source, elf, opened)


def find_loadable(code: Code, index: Index) -> LoadableTables:
    """Finds the unwind tables for a file, which must remain open.

    Raises :class:`TableRefused` on failure.
    """
    with refusing():
        return _find(code.source, code.elf, code.file, index)


def _check_unchanged(opened: OpenedFile) -> None:
    if opened.content.has_changed():
        raise TableRefused(Refusal.CHANGED)


def _find(source: Source, elf: ElfFile, opened: OpenedFile | None, index: Index) -> LoadableTables:
    check_texts(elf.texts)
    tables = find_tables(source, elf)
    if opened is None and tables is None:
        tables = make_vdso_tables(source, elf)
    made: Tables | None = None
    if opened is not None and elf.is_go and tables is None:
        tables = _index_frames_of_c(source, elf, opened, index)
    if opened is not None and (elf.is_go or tables is None):
        made = _find_go(source, elf, opened, tables, index)
    if opened is not None and made is None:
        tables = tables or _index_frames(source, elf, opened, index)
        made = _find_code(source, elf, opened, tables, index)
    tables = made or tables
    if tables is None:
        raise TableRefused(Refusal.NO_FRAMES)
    return LoadableTables(source, tables, elf, opened)


def _index_frames(source: Source, elf: ElfFile, opened: OpenedFile, index: Index) -> Tables | None:
    """Builds the search table for ``.eh_frame``; None if the file lacks this section."""
    try:
        frames = find_section(source, elf, _FRAMES)
    except ElfError as error:
        if error.problem is ElfProblem.NO_SECTION:
            return None
        raise
    source.read(frames.offset, 0)  # raises if the section is not in the file
    try:
        return index(functools.partial(index_frames, opened.fd, frames))
    except TableRefused as error:
        if error.refusal is Refusal.NO_FRAMES:
            return None
        raise


def _index_frames_of_c(
    source: Source, elf: ElfFile, opened: OpenedFile, index: Index
) -> Tables | None:
    """Builds the search table for C code in a Go program; None if the table is not usable."""
    try:
        return _index_frames(source, elf, opened, index)
    except TableRefused as error:
        _log.debug("no unwind tables for C code in %s: %s", opened.path, error)
    return None


def _find_code(
    source: Source, elf: ElfFile, opened: OpenedFile, others: Tables | None, index: Index
) -> Tables | None:
    """Returns ``others`` plus tables for code without unwind rules; None if nothing was added."""
    if elf.machine != MACHINES["x86_64"] or not (gaps := find_gaps(source, elf, others)):
        return None
    try:
        return index(functools.partial(index_code, opened.fd, source, elf, gaps, others))
    except TableRefused as error:
        _log.debug("cannot build unwind tables for code in %s: %s", opened.path, error)
    return None


def _find_go(
    source: Source, elf: ElfFile, opened: OpenedFile, others: Tables | None, index: Index
) -> Tables | None:
    """Builds tables for a file's Go code and C code; None if no table is usable."""
    for name in _GO_TABLES:
        try:
            table, text = find_section(source, elf, name), find_section(source, elf, _TEXT)
        except ElfError as error:
            if error.problem is ElfProblem.NO_SECTION:
                continue
            raise
        try:
            return index(functools.partial(index_go, opened.fd, elf, table, text, others))
        except TableRefused as error:
            _log.debug("cannot build unwind tables for Go code in %s: %s", opened.path, error)
    return None
