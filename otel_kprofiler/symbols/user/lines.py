"""Reads source lines and inlined functions of user-space binaries from their DWARF data.

The symbolic library converts a file's DWARF once, in a child process, to a format for fast lookups.
"""

import importlib.util
import mmap
import os
import struct
import tempfile
import threading
from contextlib import suppress
from typing import Final, NamedTuple

from otel_kprofiler.elf import (
    SHF_COMPRESSED,
    SHT_NOBITS,
    ElfError,
    FileSource,
    Section,
    hash_file,
    read_debug_elf,
    read_sections,
    unpacked_size,
)
from otel_kprofiler.errors import DependencyError, describe_error
from otel_kprofiler.host import (
    CacheDirectory,
    ChildFailed,
    ChildLimits,
    ChildProblem,
    CpuRate,
    LimitedChildren,
    RefusedFiles,
    child_command,
)
from otel_kprofiler.model import find_unique
from otel_kprofiler.symbols.user import convert_lines
from otel_kprofiler.symbols.user.convert_lines import HEADER, MAGIC
from otel_kprofiler.symbols.user.lines_error import LinesError, LinesProblem
from otel_kprofiler.symbols.user.symcache import VERSION, SymCache

_LEAST_BYTES: Final = 16 << 20
"""Memory used by the interpreter and the ``symbolic`` library before a conversion."""
_OLD_PREFIX: Final = b".zdebug_"
_OLD_HEADER: Final = struct.Struct(">4sQ")
"""Header that GNU tools wrote before SHF_COMPRESSED: "ZLIB" and the decompressed size."""
_COSTLY: Final = frozenset(
    {LinesProblem.DAMAGED, LinesProblem.MEMORY, LinesProblem.CPU_TIME, LinesProblem.TIME}
)
"""Failures that may cost as much CPU time as a complete conversion."""
_PROBLEMS: Final = {
    ChildProblem.UNANSWERED: LinesProblem.UNANSWERED,
    ChildProblem.NO_PROCESS: LinesProblem.NO_PROCESS,
    ChildProblem.MEMORY: LinesProblem.MEMORY,
    ChildProblem.CPU_TIME: LinesProblem.CPU_TIME,
    ChildProblem.TIME: LinesProblem.TIME,
    ChildProblem.FAILED: LinesProblem.DAMAGED,
}
_EXCEEDED: Final = (LinesProblem.CPU_TIME, LinesProblem.TIME)


class ConversionLimits(NamedTuple):
    """Limits on a file, and on the process that converts the file's DWARF.

    Attributes:
        memory_bytes: the process's memory limit; at most half of the cgroup's available memory.
            Converting an 11 MB file takes 60 MB, and a 350 MB file about 1 GB.
        result_bytes: size limit for the result, which is kept on disk.
        cpu: CPU time limit, growing with the size of the uncompressed DWARF; five times the time
            required for the output of common compilers.
        wall_s: elapsed time limit, which allows for busy machines.
    """

    file_bytes: int = 1 << 30
    memory_bytes: int = 4 << 30
    result_bytes: int = 256 << 20
    cpu: CpuRate = CpuRate(least_s=3, per_mib_s=0.25, most_s=60)
    wall_s: float = 180.0


DEFAULT_LIMITS: Final = ConversionLimits()


class SymbolicLines:
    """Provides source lines and inlined functions, using the symbolic library. Thread-safe.

    Functions have no lines if their DWARF is split, and inlined functions have no names if their
    names are in the common file that ``dwz -m`` writes. The cache identifies a file by its
    modification time and a hash of its size and its first and last pages, and contains only files
    with a unique build id; other files may differ in bytes that the hash does not cover. Converts
    one file at a time, in a child process without capabilities.

    ``cache`` keeps converted lines for later runs. If ``cache`` is None, the lines are cached only
    while in use. Raises ``DependencyError`` if symbolic is not installed.
    """

    def __init__(
        self, cache: CacheDirectory | None, limits: ConversionLimits = DEFAULT_LIMITS
    ) -> None:
        if importlib.util.find_spec("symbolic") is None:
            raise DependencyError(
                "reading source lines requires symbolic, which is not installed",
                hint="pip install 'otel-kprofiler[dwarf]'",
            )
        self._cache = cache
        self._limits = limits
        self._turn = threading.Lock()
        self._children = LimitedChildren()
        self._refused: RefusedFiles[tuple[str, LinesProblem, bool]] = RefusedFiles()

    def open(
        self, source: FileSource, path: str = "", alternate: FileSource | None = None
    ) -> SymCache:
        """Open the source lines in a file or its debug file, converting them if necessary.

        The caller may close ``source`` after this call. Conversion takes about 0.2 s, or 30 s for a
        kernel. After a failure, an unchanged file is not converted again for an hour, or for 30 s
        if the cause is temporary, such as a full disk. ``path`` and ``alternate`` are unused.

        Raises:
            LinesError: a limit was exceeded, or the DWARF is malformed.
            ElfError: the file cannot be read.
        """
        changed = os.fstat(source.fd).st_mtime_ns
        name = f"{hash_file(source)}-{changed:x}.lines-{MAGIC[-1:].decode()}-{VERSION}"
        cache = self._cache if _is_unique(source) else None
        if cache and (fd := cache.open(name)) is not None:
            try:
                return _map(fd)
            except LinesError:  # the cached file is corrupt
                cache.remove(name)
            finally:
                os.close(fd)
        if source.size > self._limits.file_bytes:
            raise LinesError(
                f"the file is larger than the limit of {self._limits.file_bytes >> 20} MiB",
                LinesProblem.TOO_LARGE,
            )
        if (reason := self._refused.find(name)) is not None:
            text, problem, may_pass = reason
            raise LinesError(text, problem, may_pass=may_pass)
        try:
            if cache is None:
                return self._convert(source)
            return self._convert_to(cache, name, source)
        except LinesError as error:
            if error.problem in _COSTLY:
                reason = str(error), error.problem, error.may_pass
                self._refused.add(name, reason, may_pass=error.may_pass)
            raise

    def _convert_to(self, cache: CacheDirectory, name: str, source: FileSource) -> SymCache:
        try:
            file = cache.create(name)
        except OSError as error:  # do not use a temporary file instead: /tmp may be a tmpfs
            text = f"the converted lines cannot be kept in {cache.path}: {error.strerror}"
            raise LinesError(text, LinesProblem.NOT_KEPT, may_pass=True) from error
        try:
            self._run(source, file.fd)
            table = _map(file.fd)
            with suppress(OSError):  # the disk is full, so the result is not cached
                file.finish()
                cache.trim()
            return table
        finally:
            file.abandon()

    def _convert(self, source: FileSource) -> SymCache:
        with tempfile.TemporaryFile() as file:
            self._run(source, file.fileno())
            return _map(file.fileno())

    def _run(self, source: FileSource, result: int) -> None:
        of_file = self._limits
        limits = ChildLimits(
            of_file.memory_bytes,
            of_file.cpu.grant(count_dwarf_bytes(source)),
            of_file.wall_s,
            _LEAST_BYTES,
        )
        command = child_command(convert_lines.__name__, str(of_file.result_bytes))
        try:
            with self._turn:
                self._children.run(command, source.fd, limits, result)
        except ChildFailed as error:
            raise _refuse(source, error) from error


def _refuse(source: FileSource, failed: ChildFailed) -> LinesError:
    problem = _PROBLEMS[failed.problem]
    if problem is LinesProblem.DAMAGED:
        text = f"the DWARF cannot be converted: {failed}"
        return LinesError(text, may_pass=failed.may_pass)
    if problem is LinesProblem.MEMORY and failed.grant:
        size = -(-source.size >> 20)
        limit = failed.grant.describe("raise max_user_symbol_megabytes")
        text = f" of a {size} MiB file takes more memory than {limit}"
    else:  # ``failed`` begins with "took" if a limit was exceeded, and is a sentence otherwise
        text = f" {failed}" if problem in _EXCEEDED else f": {failed}"
    return LinesError(f"converting the DWARF{text}", problem, may_pass=failed.may_pass)


def _is_unique(source: FileSource) -> bool:
    try:
        elf = read_debug_elf(source)
    except ElfError:
        return False
    return find_unique(elf.build_id, is_go=elf.is_go) is not None


def count_dwarf_bytes(source: FileSource) -> int:
    """Returns the size of the uncompressed DWARF; 0 if it cannot be read."""
    try:
        sections = read_sections(source, read_debug_elf(source))
        return sum(
            _unpacked_size(source, section)
            for section in sections
            if section.name.startswith((b".debug_", _OLD_PREFIX))
        )
    except ElfError:
        return 0


def _unpacked_size(source: FileSource, section: Section) -> int:
    if section.kind == SHT_NOBITS:
        return 0
    if section.flags & SHF_COMPRESSED:
        return unpacked_size(source, section)
    if section.name.startswith(_OLD_PREFIX):
        magic, size = _OLD_HEADER.unpack(source.read(section.offset, _OLD_HEADER.size))
        return int(size) if magic == b"ZLIB" else 0
    return min(section.size, source.size)


def _map(fd: int) -> SymCache:
    try:
        data = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        magic, base, is_partial = HEADER.unpack_from(data)
        if magic != MAGIC:
            raise LinesError("the converted line table is corrupt")
        return SymCache(memoryview(data)[HEADER.size :], base, is_partial=bool(is_partial))
    except (OSError, ValueError, struct.error) as error:
        text = f"the converted line table is corrupt: {describe_error(error)}"
        raise LinesError(text, may_pass=isinstance(error, OSError)) from error
