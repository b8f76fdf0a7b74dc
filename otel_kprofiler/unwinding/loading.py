"""From a request to tables that can be copied into a map."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from otel_kprofiler.model import VDSO_NAME, FileDetails, KnownFiles, Segment
from otel_kprofiler.unwinding.elf import ElfFile, find_section, read_elf
from otel_kprofiler.unwinding.identity import hash_file
from otel_kprofiler.unwinding.image import check_texts, image_pages, write_image
from otel_kprofiler.unwinding.opening import Files, OpenedFile, open_mapped
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused
from otel_kprofiler.unwinding.request import VDSO, FileRequest
from otel_kprofiler.unwinding.source import FileSource, ImageSource, Source
from otel_kprofiler.unwinding.table import Tables, find_tables

Index = Callable[[int, Segment], Tables]
"""Makes the search table of the ``.eh_frame`` of an open file."""

_FRAMES: Final = b".eh_frame"


class LoadableTables:
    """The tables of an open file, found and checked."""

    def __init__(
        self, source: Source, tables: Tables, elf: ElfFile, opened: OpenedFile | None
    ) -> None:
        self._source, self._tables, self._elf, self._opened = source, tables, elf, opened
        self.pages = image_pages(tables)

    def fill(self, target: memoryview, serial: int) -> None:
        """Copy them. Raises :class:`TableRefused` if the file changed meanwhile."""
        write_image(target, self._source, self._tables, self._elf, serial)
        if self._opened is not None and self._opened.has_changed():
            raise TableRefused(Refusal.CHANGED)


@contextmanager
def open_tables(
    request: FileRequest, files: Files, known: KnownFiles, index: Index
) -> Iterator[LoadableTables]:
    """Open the file of a request, remember its details, and find its tables.

    Raises:
        TableRefused: it could not be opened, or its tables are not usable. Its details are
            remembered if it could be read.
    """
    if request.key == VDSO:
        image = ImageSource(read_vdso(files))
        elf = read_elf(image)
        known.add(VDSO, FileDetails(VDSO_NAME, elf.build_id, hash_file(image), elf.texts))
        yield _find(image, elf, None, index)
        return
    before = known.get(request.key)
    opened = open_mapped(request, files, before.path if before else "")
    try:
        source = FileSource(opened.fd, opened.status.st_size)
        details = FileDetails(opened.path, None, hash_file(source), (), opened.deleted)
        try:
            elf = read_elf(source)
        except TableRefused:
            known.add(request.key, details)
            raise
        known.add(request.key, details._replace(build_id=elf.build_id, texts=elf.texts))
        yield _find(source, elf, opened, index)
    finally:
        opened.close()


def _find(source: Source, elf: ElfFile, opened: OpenedFile | None, index: Index) -> LoadableTables:
    check_texts(elf.texts)
    tables = find_tables(source, elf)
    if tables is None:
        frames = find_section(source, elf, _FRAMES)
        if opened is None:
            raise TableRefused(Refusal.NO_FRAMES)
        source.read(frames.offset, 0)  # is it in the file?
        tables = index(opened.fd, frames)
    return LoadableTables(source, tables, elf, opened)


def read_vdso(files: Files) -> bytes:
    """The kernel's vDSO, from this process's memory.

    Raises:
        TableRefused: there is none (``vdso=0`` on the kernel's command line).
    """
    for line in files.read_bytes("/proc/self/maps").splitlines():
        if line.endswith(VDSO_NAME.encode()):
            start, end = (int(number, 16) for number in line.split(None, 1)[0].split(b"-"))
            return ctypes.string_at(start, end - start)
    raise TableRefused(Refusal.GONE, "this process has no vDSO")
