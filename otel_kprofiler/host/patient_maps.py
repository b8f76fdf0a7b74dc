"""Reads the memory maps of processes that may hold their mmap_lock indefinitely.

Reads of ``/proc/PID/maps`` (before Linux 6.17) and ``map_files`` take the process's ``mmap_lock``.
A thread in mmap(2) holds ``mmap_lock`` while it waits for a dead file server.
"""

import re
from collections.abc import Callable
from errno import ENOENT
from typing import Final, TypeVar

from otel_kprofiler.host.mapped_files import ReferableFiles
from otel_kprofiler.host.patient_calls import PatientCalls

_PATIENCE_S: Final = 0.25
_LOCKED: Final = re.compile(r"/proc/(\d+)/(?:maps$|map_files/)")

ValueT = TypeVar("ValueT")


class PatientMaps:
    """Reads a host's files, but skips memory maps that take too long to read. Thread-safe."""

    def __init__(self, files: ReferableFiles) -> None:
        self._files = files
        self._calls = PatientCalls("kprofiler-maps", _PATIENCE_S)
        self.locked: set[int] = set()
        """Ids of the processes whose maps could not be read."""

    def open_fd(self, path: str) -> int:
        """Open a file for reading; the caller closes the descriptor."""
        return self._call(path, lambda: self._files.open_fd(path))

    def read_bytes(self, path: str) -> bytes:
        """Returns the entire contents of a file."""
        return self._call(path, lambda: self._files.read_bytes(path))

    def list_dir(self, path: str) -> list[str]:
        """Returns the names in a directory, sorted."""
        return self._call(path, lambda: self._files.list_dir(path))

    def read_link(self, path: str) -> str:
        """Returns the target of a symbolic link."""
        return self._call(path, lambda: self._files.read_link(path))

    def open_reference(self, path: str) -> int:
        """Open a file as a reference (``O_PATH``), which has no effect on the file."""
        return self._call(path, lambda: self._files.open_reference(path))

    def open_reference_in(self, root: str, path: str) -> int:
        """Open a file as a reference, with its path and links resolved relative to ``root``."""
        return self._files.open_reference_in(root, path)

    def stop(self) -> None:
        """Stop all threads, without waiting for those that are blocked."""
        self._calls.stop()

    def _call(self, path: str, read: Callable[[], ValueT]) -> ValueT:
        match = _LOCKED.match(path)
        if match is None:
            return read()
        pid = int(match[1])
        outcome: list[ValueT | OSError] = []

        def job() -> None:
            try:
                outcome.append(read())
            except OSError as error:
                outcome.append(error)

        if pid in self.locked or not self._calls.call(pid, job):
            self.locked.add(pid)
            raise FileNotFoundError(ENOENT, "the process is stuck holding its mmap_lock", path)
        if isinstance(outcome[0], OSError):
            raise outcome[0]
        return outcome[0]
