"""Resolves user addresses in processes, using their current mappings."""

import errno
import threading
from collections.abc import Sequence
from typing import Final

from otel_kprofiler.host import (
    TICK_NS,
    Access,
    HostFiles,
    MemoryMapping,
    ProcessMaps,
    ReferableFiles,
    parse_mappings,
    read_maps,
    read_start_ticks,
)
from otel_kprofiler.model import USER_SIDE, Frame, ProcessKey, Unresolved
from otel_kprofiler.symbols.resolution import Resolution, make_unknown
from otel_kprofiler.symbols.resolvers.files import CodeFile
from otel_kprofiler.symbols.resolvers.jit import MadeCode
from otel_kprofiler.symbols.resolvers.mapped import DEFAULT_MAX_BYTES, MappedCode
from otel_kprofiler.symbols.user.sources import SymbolSources

_NO_RIGHT: Final = (errno.EPERM, errno.EACCES)


def find_process(pid: int, files: HostFiles | None = None) -> ProcessKey | None:
    """Returns the process that currently has a pid; None if there is no such process.

    The process's start time has a resolution of 10 ms (``/proc/PID/stat``).
    """
    ticks = read_start_ticks(files or Access(), pid)
    return None if ticks is None else ProcessKey(pid, ticks * TICK_NS)


class ProcessesResolver:
    """Resolves addresses in user code in any process. Thread-safe.

    Each call reads the process's mappings, which requires permission to trace the process
    (ptrace(2), PTRACE_MODE_READ). Symbols are cached per file. If a pid has been reused, its
    addresses remain unresolved, rather than being resolved in the new process.

    Args:
        symbols: reads function names; by default, from the files and their installed debug files.
        max_bytes: memory limit for symbols; the least recently used files are evicted.
    """

    def __init__(
        self,
        *,
        symbols: SymbolSources | None = None,
        files: ReferableFiles | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self._files = files or Access()
        self._code = MappedCode(symbols or SymbolSources(), self._files, max_bytes)
        self._made = MadeCode(self._files)
        self._lock = threading.Lock()

    def resolve(self, addresses: Sequence[int], pid: int | None = None) -> list[Resolution]:
        """Resolves addresses in a process. If ``pid`` is None, all addresses remain unresolved."""
        if pid is None:
            return [make_unknown(address, Unresolved.NO_PROCESS) for address in addresses]
        return self.resolve_in(find_process(pid, self._files), addresses)

    def resolve_in(self, process: ProcessKey | None, addresses: Sequence[int]) -> list[Resolution]:
        """Resolves addresses in a process; ``process`` is None if the process has exited."""
        resolutions = self._look_up(process, addresses) if process else Unresolved.PROCESS_GONE
        if isinstance(resolutions, Unresolved):
            return [make_unknown(address, resolutions, process) for address in addresses]
        return resolutions

    def find(self, name: str, pid: int | None = None) -> list[Resolution]:
        """Finds a process's functions by linkage name or demangled name.

        Reads every file that the process has mapped as executable.
        """
        process = None if pid is None else find_process(pid, self._files)
        return [] if process is None else self.find_in(process, name)

    def find_in(self, process: ProcessKey, name: str) -> list[Resolution]:
        """Finds functions by name. Returns an empty list if the process has exited."""
        matches = []
        with self._lock:
            for mapping in self._mappings(process):
                code = self._code.get(process, mapping)
                if isinstance(code, Unresolved):
                    continue
                for frame in code.find(name):
                    offset = code.find_offset(frame.address)
                    if offset is not None and _shows(mapping, offset):
                        address = mapping.start + offset - mapping.file_offset
                        matches.append(Resolution(address, frame, process, mapping.path, offset))
        return matches if find_process(process.tgid, self._files) == process else []

    def find_offset(self, path: str, offset: int, pid: int) -> list[Resolution]:
        """Finds the addresses at which a process has mapped a file offset as executable code.

        ``path`` is the path of the file as seen by the process.
        """
        process = find_process(pid, self._files)
        if process is None:
            return []
        places = [
            mapping.start + offset - mapping.file_offset
            for mapping in self._mappings(process)
            if mapping.path == path and _shows(mapping, offset)
        ]
        answers = self.resolve_in(process, places)
        return [answer for answer in answers if answer.path == path]

    def close(self) -> None:
        """Forget all symbols."""
        with self._lock:
            self._code.close()
            self._made.close()

    def _look_up(
        self, process: ProcessKey, addresses: Sequence[int]
    ) -> list[Resolution] | Unresolved:
        try:
            maps = ProcessMaps(process.tgid, self._files)
        except OSError as error:
            hidden = error.errno in _NO_RIGHT
            return Unresolved.PROCESS_HIDDEN if hidden else Unresolved.PROCESS_GONE
        try:
            with self._lock:
                question = _Question(process, maps, self._code, self._made)
                answers = [question.answer(address) for address in addresses]
        except OSError:
            return Unresolved.PROCESS_GONE
        finally:
            maps.close()
        # Checked last, because the process may have exited, and its pid may have been reused.
        is_there = find_process(process.tgid, self._files) == process
        return answers if is_there else Unresolved.PROCESS_GONE

    def _mappings(self, process: ProcessKey) -> list[MemoryMapping]:
        try:
            text = read_maps(self._files, process.tgid)
        except OSError:
            return []
        return [mapping for mapping in parse_mappings(text) if mapping.is_executable]


class ProcessResolver:
    """Resolves addresses in the process that had the pid when this object was created. Thread-safe.

    ``processes`` performs the lookups. By default, this object creates and closes a resolver.
    """

    def __init__(self, pid: int, processes: ProcessesResolver | None = None) -> None:
        self._processes = processes or ProcessesResolver()
        self._is_own = processes is None
        self.process = find_process(pid)
        """Pid and start time of the process; None if there was no such process."""

    def resolve(self, addresses: Sequence[int], pid: int | None = None) -> list[Resolution]:
        """Resolves addresses in the process. A different ``pid`` is treated as exited."""
        return self._processes.resolve_in(self._asked(pid), addresses)

    def find(self, name: str, pid: int | None = None) -> list[Resolution]:
        """Finds the process's functions by linkage name or demangled name."""
        process = self._asked(pid)
        return [] if process is None else self._processes.find_in(process, name)

    def close(self) -> None:
        """Release all symbols, unless ``processes`` was given."""
        if self._is_own:
            self._processes.close()

    def _asked(self, pid: int | None) -> ProcessKey | None:
        is_ours = self.process is not None and pid in (None, self.process.tgid)
        return self.process if is_ours else None


class _Question:
    """Resolves the addresses of one query, looking up each mapping only once."""

    def __init__(
        self, process: ProcessKey, maps: ProcessMaps, code: MappedCode, made: MadeCode
    ) -> None:
        self._process, self._maps, self._code, self._made = process, maps, code, made
        self._seen: list[tuple[MemoryMapping, CodeFile | Unresolved]] = []

    def answer(self, address: int) -> Resolution:
        place = self._find(address)
        if place is None:
            return make_unknown(address, Unresolved.UNMAPPED, self._process)
        mapping, code = place
        offset = address - mapping.start + mapping.file_offset
        if isinstance(code, CodeFile) and not code.details.may_be_generated:
            frame = code.frame_at(offset)
        else:
            made = self._made.frame(self._process, address) if mapping.is_executable else None
            reason = Unresolved.NO_FILE if isinstance(code, CodeFile) else code
            frame = made or Frame(None, address, (), 0, USER_SIDE, reason)
        known_offset = offset if mapping.path.startswith("/") else None
        return Resolution(address, frame, self._process, mapping.path, known_offset)

    def _find(self, address: int) -> tuple[MemoryMapping, CodeFile | Unresolved] | None:
        for seen in self._seen:
            if seen[0].start <= address < seen[0].end:
                return seen
        mapped = self._maps.find(address)
        if mapped is None:
            return None
        mapping = mapped.mapping
        self._seen.append((mapping, self._code.get(self._process, mapping)))
        return self._seen[-1]


def _shows(mapping: MemoryMapping, offset: int) -> bool:
    return 0 <= offset - mapping.file_offset < mapping.end - mapping.start
