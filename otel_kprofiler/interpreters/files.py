"""Finds interpreters in mapped files, reading each file once."""

import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from otel_kprofiler.elf import ElfError, FileSource, read_elf
from otel_kprofiler.errors import describe_error
from otel_kprofiler.host import (
    FileProblem,
    FileRequest,
    MappedFileError,
    MemoryMapping,
    PatientCalls,
    ReferableFiles,
    open_mapped,
    open_regular,
    parse_mappings,
    read_maps,
)
from otel_kprofiler.interpreters.binary import Interpreter, find_interpreter
from otel_kprofiler.interpreters.refusal import InterpreterRefused, Refusal
from otel_kprofiler.model import BuildId, FileKey, OpenFile
from otel_kprofiler.stopping import reading

MAX_FILES: Final = 4096
_PYTHON: Final = "python"

_log = logging.getLogger(__name__)
_Key = BuildId | tuple[int, int, str]


class InterpreterFiles:
    """Finds CPython in executables and libraries, and caches the results. Not thread-safe.

    ``on_found`` is called with each new interpreter, before any process that runs it is registered.
    ``calls`` runs the functions that read files. A file that cannot be read is refused if its name
    contains ``python``, and is otherwise treated as a file without an interpreter.
    """

    def __init__(
        self,
        files: ReferableFiles,
        on_found: Callable[[Interpreter], None] | None,
        calls: PatientCalls,
    ) -> None:
        self._calls = calls
        self._files = files
        self._on_found = on_found
        self._found: OrderedDict[_Key, Interpreter | Refusal | None] = OrderedDict()
        self._logged: set[tuple[str, Refusal]] = set()
        self.refused: Counter[Refusal] = Counter()
        """Number of files with a rejected interpreter, by reason."""
        self.unread = 0
        """Number of failed attempts to read a file."""

    def find(
        self, pid: int, mapping: MemoryMapping, build_id: BuildId | None
    ) -> Interpreter | Refusal | None:
        """Returns a file's interpreter, or why it is rejected; None if the file has no interpreter.

        ``pid`` identifies a process that has mapped the file. The mapping's device and inode are 0
        if unknown. ``build_id`` is None if absent or unknown.
        """
        key = build_id or (mapping.device, mapping.inode, mapping.path)
        if key in self._found:
            self._found.move_to_end(key)
            return self._found[key]
        read = self._read_patiently(pid, mapping, build_id)
        if isinstance(read, OSError | MappedFileError):
            self.unread += 1
            if _PYTHON in mapping.path.rpartition("/")[2]:
                refused = InterpreterRefused(Refusal.NOT_OPENED, describe_error(read))
                return self._refuse(mapping, refused)
            return None  # not cached: the file may be readable through a different process
        interpreter = self._refuse(mapping, read) if isinstance(read, InterpreterRefused) else read
        if isinstance(interpreter, Interpreter) and self._on_found:
            self._on_found(interpreter)
        self._found[key] = interpreter
        if len(self._found) > MAX_FILES:
            self._found.popitem(last=False)
        return interpreter

    def _read_patiently(
        self, pid: int, mapping: MemoryMapping, build_id: BuildId | None
    ) -> Interpreter | OSError | MappedFileError | InterpreterRefused | None:
        outcome: list[Interpreter | OSError | MappedFileError | InterpreterRefused | None] = []

        def read() -> None:
            try:
                with reading(mapping.path):
                    outcome.append(self._read(pid, mapping, build_id))
            except (OSError, MappedFileError, InterpreterRefused) as error:
                outcome.append(error)

        device = mapping.device
        if self._calls.has_left(device) or not self._calls.call(device, read):
            return MappedFileError(FileProblem.UNREADABLE, "the file system is not responding")
        failed = MappedFileError(FileProblem.UNREADABLE, "reading failed; see the log")
        return outcome[0] if outcome else failed

    def _read(
        self, pid: int, mapping: MemoryMapping, build_id: BuildId | None
    ) -> Interpreter | None:
        file = self._open(pid, mapping, build_id)
        try:
            return find_interpreter(FileSource(file.fd, file.size))
        finally:
            os.close(file.fd)

    def _refuse(self, mapping: MemoryMapping, error: InterpreterRefused) -> Refusal:
        line = mapping.path, error.refusal
        if error.refusal is not Refusal.NOT_OPENED or line not in self._logged:  # not a retry
            self.refused[error.refusal] += 1
        if line not in self._logged and len(self._logged) < MAX_FILES:
            self._logged.add(line)
            _log.warning("no Python frames for %s: %s", mapping.path, error)
        return error.refusal

    def _open(self, pid: int, mapping: MemoryMapping, build_id: BuildId | None) -> OpenFile:
        if not mapping.inode and build_id:
            try:
                mapping = self._find_in_maps(pid, mapping)
            except OSError:
                return self._open_by_path(mapping.path, build_id)
        key = FileKey(mapping.inode, mapping.device, 0)
        request = FileRequest(key, mapping.start, mapping.end, mapping.file_offset, pid, pid)
        return open_mapped(request, self._files, mapping.path).content

    def _find_in_maps(self, pid: int, mapping: MemoryMapping) -> MemoryMapping:
        for candidate in parse_mappings(read_maps(self._files, pid)):
            if candidate.start == mapping.start and candidate.is_executable:
                return candidate
        raise MappedFileError(FileProblem.GONE)

    def _open_by_path(self, path: str, build_id: BuildId) -> OpenFile:
        """Open a file by its path in this process's mount namespace, without capabilities."""
        file = open_regular(self._files, path)
        with suppress(ElfError):
            if read_elf(FileSource(file.fd, file.size)).build_id == build_id:
                return file
        os.close(file.fd)
        raise MappedFileError(FileProblem.NOT_SAME, path)
