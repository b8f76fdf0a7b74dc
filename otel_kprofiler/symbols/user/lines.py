"""Source lines and inlined functions of user files, from their DWARF.

The library ``symbolic`` converts the DWARF of a file once, in a process of its own, to a file of
which a look-up reads a few pages.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import signal
import struct
import subprocess
import tempfile
import threading
from contextlib import suppress
from typing import Final, NamedTuple

from otel_kprofiler.elf import FileSource, hash_file
from otel_kprofiler.errors import DependencyError, KProfilerError, describe_error, describe_status
from otel_kprofiler.host import (
    CacheDirectory,
    MemoryGrant,
    child_command,
    grant_memory,
    limit_memory,
)
from otel_kprofiler.symbols.user import convert_lines
from otel_kprofiler.symbols.user.convert_lines import HEADER, MAGIC
from otel_kprofiler.symbols.user.symcache import VERSION, SymCache

_SHOWN: Final = 200
_LEAST_BYTES: Final = 16 << 20
"""Data of the interpreter and the library, before they convert anything."""
_OUT_OF_MEMORY: Final = (-signal.SIGABRT, -signal.SIGKILL)
"""How the process ends if the library gets no memory, or the kernel has none."""
_FIX: Final = "raise max_user_symbol_megabytes"


class LinesError(KProfilerError):
    """The source lines of a file cannot be read: it is damaged, too large, or made to be slow."""


class ConversionLimits(NamedTuple):
    """Limits of a file, and of the process that converts it.

    Attributes:
        file_bytes: size of the file.
        memory_bytes: data of the process; at most half of what the cgroup leaves. A debug file of
            11 MB takes 60 MB, one of 350 MB about 1 GB.
        result_bytes: size of the result, which is kept on disk.
        cpu_s: CPU time.
        wall_s: time in all, for a machine that is busy.
    """

    file_bytes: int = 1 << 30
    memory_bytes: int = 4 << 30
    result_bytes: int = 256 << 20
    cpu_s: int = 60
    wall_s: float = 180.0


DEFAULT_LIMITS: Final = ConversionLimits()


class SymbolicLines:
    """Opens source lines and inlined functions with the library ``symbolic``; thread-safe.

    Split DWARF is not followed (functions have no lines then), nor are files of ``dwz -m`` (inlined
    functions have no names then). A file is recognized by its size, its first and last page, and
    the time of its last change. The child process has no capabilities. One file is converted at a
    time.

    Args:
        cache: keeps what was converted, also for the next run; None: it is kept while in use.
        limits: what a file and its conversion may take.

    Raises:
        DependencyError: the library is not installed.
    """

    def __init__(
        self, cache: CacheDirectory | None, limits: ConversionLimits = DEFAULT_LIMITS
    ) -> None:
        if importlib.util.find_spec("symbolic") is None:
            raise DependencyError(
                "source lines need the library symbolic, which is not installed",
                hint="pip install 'otel-kprofiler[dwarf]'",
            )
        self._cache = cache
        self._limits = limits
        self._turn = threading.Lock()

    def open(
        self, source: FileSource, path: str = "", alternate: FileSource | None = None
    ) -> SymCache:
        """Open the lines of a file, or of the debug file of it; converts them if need be.

        Reading them needs no more of the file. Converting takes about 0.2 s, and 30 s for a kernel.

        Args:
            source: the file.
            path: where it is; not used here.
            alternate: what dwz(1) moved parts of its DWARF to; not used here.

        Raises:
            LinesError: a limit was exceeded, or the DWARF is damaged.
            ElfError: the file cannot be read.
        """
        changed = os.fstat(source.fd).st_mtime_ns
        name = f"{hash_file(source)}-{changed:x}.lines-{MAGIC[-1:].decode()}-{VERSION}"
        if self._cache and (fd := self._cache.open(name)) is not None:
            try:
                return _map(fd)
            except LinesError:  # damaged on disk
                self._cache.remove(name)
            finally:
                os.close(fd)
        if source.size > self._limits.file_bytes:
            raise LinesError(f"the file is larger than {self._limits.file_bytes >> 20} MiB")
        if self._cache is None:
            return self._convert(source)
        return self._convert_to(self._cache, name, source)

    def _convert_to(self, cache: CacheDirectory, name: str, source: FileSource) -> SymCache:
        try:
            file = cache.create(name)
        except OSError as error:  # a temporary file may be one in memory
            where = f"{cache.path}: {error.strerror}"
            raise LinesError(f"the converted lines cannot be kept in {where}") from error
        try:
            self._run(source, file.fd)
            table = _map(file.fd)
            with suppress(OSError):  # the disk is full: it is not kept
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
        """Convert in a new interpreter."""
        limits = self._limits
        numbers = (limits.result_bytes, limits.cpu_s)
        with self._turn:
            grant = grant_memory(limits.memory_bytes)
            if grant.count_bytes < _LEAST_BYTES:
                raise _exceeds(source, grant)
            try:
                child = subprocess.Popen(
                    child_command(convert_lines.__name__, *map(str, numbers)),
                    stdin=source.fd,
                    stdout=result,
                    stderr=subprocess.PIPE,
                    cwd="/",
                )
            except OSError as error:
                raise LinesError(f"no process could be started: {describe_error(error)}") from error
            with child, limit_memory(child.pid, grant):
                try:
                    _, errors = child.communicate(timeout=limits.wall_s)
                except subprocess.TimeoutExpired as error:
                    text = f"converting the DWARF took over {limits.wall_s:g} s"
                    raise LinesError(text) from error
                finally:
                    child.kill()
        cause = errors[-_SHOWN:].decode("utf-8", "replace").strip()
        if child.returncode in _OUT_OF_MEMORY or "MemoryError" in cause:
            raise _exceeds(source, grant)
        if child.returncode:
            raise LinesError(
                f"the DWARF cannot be converted: {cause or describe_status(child.returncode)}"
            )


def _exceeds(source: FileSource, grant: MemoryGrant) -> LinesError:
    size = -(-source.size >> 20)
    return LinesError(
        f"converting the DWARF of the file of {size} MiB takes more memory than "
        f"{grant.describe(_FIX)}"
    )


def _map(fd: int) -> SymCache:
    try:
        data = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        magic, base, is_partial = HEADER.unpack_from(data)
        if magic != MAGIC:
            raise LinesError("the converted lines are damaged")
        return SymCache(memoryview(data)[HEADER.size :], base, is_partial=bool(is_partial))
    except (OSError, ValueError, struct.error) as error:
        raise LinesError(f"the converted lines are damaged: {describe_error(error)}") from error
