"""Access to the host's files.

All files of ``/proc`` and ``/sys`` are opened here, so that dropping capabilities is handled in
one place. Tests and recordings pass another root or an archive instead of patching modules.
"""

from __future__ import annotations

import os
from typing import BinaryIO, Protocol


class HostFiles(Protocol):
    """Read access to a host's files by absolute path; every method raises ``OSError``."""

    def open_fd(self, path: str) -> int:
        """Open for reading; the caller closes the descriptor."""

    def read_bytes(self, path: str) -> bytes:
        """Whole content of a file."""

    def list_dir(self, path: str) -> list[str]:
        """Names in a directory, sorted."""

    def read_link(self, path: str) -> str:
        """Target of a symbolic link."""


class Access:
    """Files of this host, or of a captured tree below ``root``.

    Paths given to :meth:`keep_open` are opened once and share a descriptor: the kernel checks the
    right to see addresses when ``/proc/kallsyms`` is opened, so a descriptor opened before
    capabilities are dropped still shows them. Reads of one kept path are not thread-safe.
    """

    def __init__(self, root: str = "/") -> None:
        self.root = root.rstrip("/")
        self._kept: dict[str, int] = {}

    def keep_open(self, path: str) -> None:
        """Open ``path`` now; later opens of it share this descriptor."""
        if path not in self._kept:
            self._kept[path] = self._open(path)

    def open_fd(self, path: str) -> int:
        """Open for reading; the caller closes the descriptor."""
        kept = self._kept.get(path)
        if kept is None:
            return self._open(path)
        os.lseek(kept, 0, os.SEEK_SET)
        return os.dup(kept)

    def read_bytes(self, path: str) -> bytes:
        """Whole content of a file."""
        with self._reader(path) as file:
            return file.read()

    def list_dir(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        return sorted(os.listdir(self.root + path))

    def read_link(self, path: str) -> str:
        """Target of a symbolic link."""
        return os.readlink(self.root + path)

    def close(self) -> None:
        """Close the kept descriptors."""
        while self._kept:
            os.close(self._kept.popitem()[1])

    def open_reference(self, path: str) -> int:
        """Open as a mere reference (``O_PATH``): no effect on the file, no right to read it."""
        return os.open(self.root + path, os.O_PATH | os.O_CLOEXEC)

    def _reader(self, path: str) -> BinaryIO:
        return open(self.open_fd(path), "rb", buffering=0)

    def _open(self, path: str) -> int:
        return os.open(self.root + path, os.O_RDONLY | os.O_CLOEXEC)


def read_limited(files: HostFiles, path: str, most_bytes: int) -> bytes:
    """Read a file up to a limit, such as a file of ``/proc`` whose size a process chooses.

    Raises:
        OSError: it cannot be opened or read.
    """
    fd = files.open_fd(path)
    try:
        parts, left = [], most_bytes
        while left and (part := os.read(fd, left)):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(fd)
    return b"".join(parts)
