"""Access to the host's files.

All files of ``/proc`` and ``/sys`` are opened here, so that tests and recordings can pass another
root or an archive instead of patching modules.
"""

from __future__ import annotations

import os
from typing import Protocol


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
    """Files of this host, or of a captured tree below ``root``. Thread-safe."""

    def __init__(self, root: str = "/") -> None:
        self.root = root.rstrip("/")

    def open_fd(self, path: str) -> int:
        """Open for reading; the caller closes the descriptor."""
        return os.open(self.root + path, os.O_RDONLY | os.O_CLOEXEC)

    def read_bytes(self, path: str) -> bytes:
        """Whole content of a file."""
        with open(self.open_fd(path), "rb", buffering=0) as file:
            return file.read()

    def list_dir(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        return sorted(os.listdir(self.root + path))

    def read_link(self, path: str) -> str:
        """Target of a symbolic link."""
        return os.readlink(self.root + path)

    def open_reference(self, path: str) -> int:
        """Open as a reference (``O_PATH``), which neither affects nor reads the file."""
        return os.open(self.root + path, os.O_PATH | os.O_CLOEXEC)


def read_limited(files: HostFiles, path: str, most_bytes: int) -> bytes:
    """Read a file up to a limit, such as a file of ``/proc`` whose size a process controls.

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
