"""Reads the segments and symbols of each user-space binary once, for all processes that map it."""

import logging
from collections.abc import Iterator
from typing import Final

from otel_kprofiler.elf import Source, find_address, hash_file, read_debug_elf, read_elf
from otel_kprofiler.errors import KProfilerError, describe_error
from otel_kprofiler.model import USER_SIDE, FileDetails, Frame, Module, Segment, Unresolved
from otel_kprofiler.symbols.cache import BoundedCache
from otel_kprofiler.symbols.user.file import FileSymbols
from otel_kprofiler.symbols.user.resolver import make_module
from otel_kprofiler.symbols.user.sources import SymbolSources

MAX_FRAMES_CACHED: Final = 4_096
"""Maximum number of cached frames per file. A frame uses about 400 bytes."""
_log: Final = logging.getLogger(__name__)


class CodeFile:
    """Maps a file's addresses (SVMA) and offsets to frames. Thread-safe.

    ``symbols`` contains the file's function names, or the reason why they are unavailable.
    """

    def __init__(
        self,
        details: FileDetails,
        loads: tuple[Segment, ...],
        symbols: FileSymbols | Unresolved,
    ) -> None:
        self.details = details
        self.symbols = symbols
        self._loads = loads
        self._whole = make_module(details, None)
        self._parts = [(text, make_module(details, text)) for text in details.texts]
        self._frames = BoundedCache(MAX_FRAMES_CACHED, self._make_frame)

    @property
    def nbytes(self) -> int:
        """Returns the memory used by the file's symbols."""
        return 0 if isinstance(self.symbols, Unresolved) else self.symbols.nbytes

    def frame(self, svma: int) -> Frame:
        """Returns the frame at an address."""
        return self._frames[svma]

    def frame_at(self, offset: int) -> Frame:
        """Returns the frame at a file offset.

        If no segment loads the offset, uses the offset as the frame's address.
        """
        svma = self.find_address(offset)
        if svma is None:
            reason = self.symbols if isinstance(self.symbols, Unresolved) else Unresolved.NO_SYMBOL
            return Frame(self._whole, offset, (), 0, USER_SIDE, reason)
        return self.frame(svma)

    def find(self, name: str) -> Iterator[Frame]:
        """Finds functions by linkage name or demangled name, sorted by address."""
        if not isinstance(self.symbols, Unresolved):
            for function in self.symbols.find(name):
                lines = (self.symbols.make_line(function.name),)
                yield Frame(self._find_module(function.start), function.start, lines, 0, USER_SIDE)

    def find_offset(self, svma: int) -> int | None:
        """Returns the file offset of an address (SVMA); None if no segment contains the address."""
        for load in self._loads:
            if 0 <= svma - load.address < load.size:
                return load.offset + svma - load.address
        return None

    def find_address(self, offset: int) -> int | None:
        """Returns the address (SVMA) at which a file offset is loaded; None if no segment loads it.

        Prefers an address in an executable segment.
        """
        address = find_address(self.details.texts, offset)
        return find_address(self._loads, offset) if address is None else address

    def _make_frame(self, svma: int) -> Frame:
        module = self._find_module(svma)
        if isinstance(self.symbols, Unresolved):
            return Frame(module, svma, (), 0, USER_SIDE, self.symbols)
        named = self.symbols.name(svma)
        offset = named.offset(svma)
        return Frame(module, svma, named.lines, offset, USER_SIDE, named.unresolved)

    def _find_module(self, svma: int) -> Module:
        for text, part in self._parts:
            if 0 <= svma - text.address < text.size:
                return part
        return self._whole


def read_code_file(
    source: Source, path: str, symbols: SymbolSources, *, root: str = "", deleted: bool = False
) -> CodeFile:
    """Reads a file, which may be closed afterwards.

    If its symbols are malformed, functions have no names. ``path`` is the path as seen by a process
    that has mapped the file. ``root`` is the root directory of that process; empty for the calling
    process. Raises ``ElfError`` if the headers are malformed.
    """
    elf = read_elf(source, None)
    if not elf.texts:  # a debug file, which has no segment contents
        elf = read_debug_elf(source)
    details = FileDetails(path, elf.build_id, hash_file(source), elf.texts, deleted, elf.is_go)
    try:
        functions = symbols.read(source, elf, details, root)
    except (KProfilerError, OSError) as error:
        _log.info("no symbols for %s: %s", path, describe_error(error))
        return CodeFile(details, elf.loads, Unresolved.SYMBOLS_REFUSED)
    return CodeFile(details, elf.loads, functions)
