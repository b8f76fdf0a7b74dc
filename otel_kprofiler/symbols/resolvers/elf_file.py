"""Resolves addresses in an ELF file, without a process."""

import os
from collections.abc import Sequence

from otel_kprofiler.elf import FileSource, ImageSource
from otel_kprofiler.model import Frame, Unresolved
from otel_kprofiler.symbols.resolution import Resolution, make_unknown
from otel_kprofiler.symbols.resolvers.files import CodeFile, read_code_file
from otel_kprofiler.symbols.user.sources import SymbolSources


class ElfResolver:
    """Resolves addresses in an executable, library or debug file. Thread-safe.

    Addresses are SVMAs, as in the symbol table; :meth:`resolve_offsets` accepts file offsets. For
    kernel files, see :class:`ElfSymbols`.

    Args:
        file: a path, the content, or an open descriptor, which the caller may close afterwards.

    Raises:
        OSError: the file cannot be opened.
        KProfilerError: the file is not a 64-bit ELF file, or its headers are malformed.
    """

    def __init__(
        self, file: str | os.PathLike[str] | int | bytes, *, symbols: SymbolSources | None = None
    ) -> None:
        self._code = _read(file, symbols or SymbolSources())
        self.path = self._code.details.path
        """Path of the file, as given."""
        self.build_id = self._code.details.build_id
        """GNU build id; None if the file has no build id."""
        self.file_id = self._code.details.file_id
        """The file's hash (htlhash)."""

    def resolve(self, addresses: Sequence[int], pid: int | None = None) -> list[Resolution]:
        """Resolves addresses (SVMA) in the file. ``pid`` is ignored."""
        return [self._answer(self._code.frame(address)) for address in addresses]

    def resolve_offsets(self, offsets: Sequence[int]) -> list[Resolution]:
        """Resolves file offsets."""
        answers = []
        for offset in offsets:
            svma = self._code.find_address(offset)
            if svma is None:
                unknown = make_unknown(offset, Unresolved.UNMAPPED, path=self.path)
                answers.append(unknown)
            else:
                answers.append(self._answer(self._code.frame(svma), offset))
        return answers

    def find(self, name: str, pid: int | None = None) -> list[Resolution]:
        """Finds functions, with their offsets for uprobes, by linkage name or demangled name."""
        return [*map(self._answer, self._code.find(name))]

    def close(self) -> None:
        """Does nothing, because the file is not kept open."""

    def _answer(self, frame: Frame, offset: int | None = None) -> Resolution:
        if offset is None:
            offset = self._code.find_offset(frame.address)
        return Resolution(frame.address, frame, None, self.path, offset)


def _read(file: str | os.PathLike[str] | int | bytes, symbols: SymbolSources) -> CodeFile:
    if isinstance(file, bytes):
        return read_code_file(ImageSource(file), "", symbols)
    path = f"/proc/self/fd/{file}" if isinstance(file, int) else os.fspath(file)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_code_file(FileSource(fd, os.fstat(fd).st_size), path, symbols)
    finally:
        os.close(fd)
