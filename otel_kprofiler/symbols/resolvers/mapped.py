"""Opens and caches the files that processes have mapped."""

import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from otel_kprofiler.elf import ElfError, FileSource, ImageSource, hash_file
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.host import (
    FileRequest,
    GrowingHolds,
    MemoryMapping,
    ReferableFiles,
    find_vdso,
    open_mapped,
)
from otel_kprofiler.model import VDSO_NAME, FileDetails, FileKey, ProcessKey, Unresolved
from otel_kprofiler.symbols.resolvers.files import CodeFile, read_code_file
from otel_kprofiler.symbols.user.loader_files import lacks_lines
from otel_kprofiler.symbols.user.sources import SymbolSources

DEFAULT_MAX_BYTES: Final = 256 << 20
MAX_PLACES: Final = 16_384
"""Maximum number of mappings whose file locations are cached."""

Identity = tuple[int, int, int, int]
"""Device, inode, size and modification time of a file."""


class _Place(NamedTuple):
    path: str
    identity: Identity


class MappedCode:
    """Caches the code of mapped files. Each file is read once for all processes. Not thread-safe.

    If symbols use more than ``max_bytes``, evicts the least recently used files. If a file's source
    lines may become readable later, for example once the file system is less busy, the file is
    reread after 30 s, and then at increasing intervals.
    """

    def __init__(
        self,
        symbols: SymbolSources,
        files: ReferableFiles,
        max_bytes: int = DEFAULT_MAX_BYTES,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._symbols = symbols
        self._files = files
        self._max_bytes = max_bytes
        self._now_s = now_s
        self._bytes = 0
        self._holds = GrowingHolds()
        self._again_s: dict[Identity, float] = {}  # when to reread files without lines
        self._code: OrderedDict[Identity, CodeFile | None] = OrderedDict()
        self._places: dict[tuple[ProcessKey, MemoryMapping], _Place] = {}
        self._vdso: CodeFile | None = None

    def get(self, process: ProcessKey, mapping: MemoryMapping) -> CodeFile | Unresolved:
        """Returns the code of a mapping's file, or why that code is unknown."""
        if mapping.path == VDSO_NAME:
            return self._get_vdso()
        if not mapping.inode:
            return Unresolved.NO_FILE
        key = process, mapping
        place = self._places.get(key)
        if place is None or place.identity not in self._code or not self._is_there(place):
            place = self._open(process, mapping)
            if place is None:
                return Unresolved.FILE_UNREADABLE
            self._places[key] = place
            while len(self._places) > MAX_PLACES:
                del self._places[next(iter(self._places))]
        elif self._now_s() >= self._again_s.get(place.identity, math.inf):
            self._read_again(process, mapping, place.identity)
        self._code.move_to_end(place.identity)
        return self._code[place.identity] or Unresolved.FILE_UNREADABLE

    def close(self) -> None:
        """Forget all files."""
        while self._code:
            self._evict()
        self._places.clear()

    def _read_again(self, process: ProcessKey, mapping: MemoryMapping, identity: Identity) -> None:
        last = self._code.pop(identity)
        self._bytes -= last.nbytes if last else 0
        self._open(process, mapping)
        new = self._code.get(identity)
        if new is None or isinstance(new.symbols, Unresolved):  # the code is no longer readable
            self._code.pop(identity, None)
            self._add(identity, last)

    def _open(self, process: ProcessKey, mapping: MemoryMapping) -> _Place | None:
        pid = process.tgid
        key = FileKey(mapping.inode, mapping.device, 0)
        request = FileRequest(key, mapping.start, mapping.end, mapping.file_offset, pid, pid)
        try:
            opened = open_mapped(request, self._files)
        except KProfilerError:
            return None
        try:
            identity = _identity(opened.status)
            if identity not in self._code:
                source = FileSource(opened.fd, opened.status.st_size)
                self._add(identity, self._read(source, opened.path, pid, opened.deleted))
            return _Place(opened.reached_at, identity)
        finally:
            opened.close()

    def _read(self, source: FileSource, path: str, pid: int, deleted: bool) -> CodeFile | None:
        root = f"/proc/{pid}/root"
        try:
            try:
                return read_code_file(source, path, self._symbols, root=root, deleted=deleted)
            except ElfError:  # any file can be mapped, not just ELF files
                details = FileDetails(path, None, hash_file(source), (), deleted)
                return CodeFile(details, (), Unresolved.NO_SYMBOL_TABLE)
        except ElfError:
            return None

    def _is_there(self, place: _Place) -> bool:
        """Returns whether a path still leads to the same file, rather than to a reused inode."""
        try:
            fd = self._files.open_reference(place.path)
        except OSError:
            return False
        try:
            return _identity(os.fstat(fd)) == place.identity
        finally:
            os.close(fd)

    def _add(self, identity: Identity, code: CodeFile | None) -> None:
        self._code[identity] = code
        self._again_s.pop(identity, None)
        if code and not isinstance(code.symbols, Unresolved):
            if lacks_lines(code.symbols):
                self._again_s[identity] = self._now_s() + self._holds.extend(identity)
            else:
                self._holds.end(identity)
        self._bytes += code.nbytes if code else 0
        while len(self._code) > 1 and self._bytes > self._max_bytes:
            self._evict()

    def _evict(self) -> None:
        identity, code = self._code.popitem(last=False)
        self._again_s.pop(identity, None)
        if code is not None:
            self._bytes -= code.nbytes

    def _get_vdso(self) -> CodeFile | Unresolved:
        if self._vdso is None:
            try:
                image = find_vdso(self._files)
                if image is not None:
                    source = ImageSource(image)
                    self._vdso = read_code_file(source, VDSO_NAME, self._symbols)
            except (OSError, ElfError):
                pass
        return self._vdso or Unresolved.FILE_UNREADABLE


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
