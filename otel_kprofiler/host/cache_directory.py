"""Keeps files in a cache directory of bounded size."""

import contextlib
import os
import re
import stat
import weakref
from collections.abc import Mapping
from typing import Final

from otel_kprofiler.host.writing import NewFile, PrivateDirectory

_NAME: Final = re.compile(r"[0-9a-z][0-9a-z._-]{0,200}")
_BLOCK_BYTES: Final = 512  # st_blocks, stat(2)
_LEAST_BYTES: Final = 4096
"""Minimum size, in bytes, that is counted for a file, to limit the number of empty files."""


def find_cache_path(environ: Mapping[str, str], user: int) -> str | None:
    """Returns this program's cache directory; None if the environment does not determine it.

    systemd sets ``CACHE_DIRECTORY`` (systemd.exec(5)), and users set ``XDG_CACHE_HOME``. By
    default, the directory is in ``/var/cache`` for root, and in ``~/.cache`` for other users.
    """
    if given := environ.get("CACHE_DIRECTORY", "").partition(":")[0]:
        return given
    home = environ.get("HOME", "")
    for parent in (
        environ.get("XDG_CACHE_HOME", ""),
        "" if user else "/var/cache",
        os.path.join(home, ".cache") if home else "",
    ):
        if os.path.isabs(parent):
            return os.path.join(parent, "otel-kprofiler")
    return None


class CacheDirectory:
    """Caches files by name, and removes the least recently used files.

    The directory can be shared by threads and processes. Removed files remain readable through
    open descriptors. The files' total size on disk may briefly exceed ``max_bytes``. Methods raise
    ``ValueError`` for names that do not match ``[0-9a-z][0-9a-z._-]{0,200}``.

    Raises ``OSError`` if the directory cannot be created, or if other users can write to it.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._directory = PrivateDirectory(path)
        weakref.finalize(self, self._directory.close)

    def open(self, name: str) -> int | None:
        """Open a file for reading; None if it is missing or belongs to another user."""
        _check(name)
        try:
            fd = self._directory.open(name, os.O_RDONLY)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(fd)
        return fd

    def create(self, name: str) -> NewFile:
        """Create a file that, when finished, replaces any file of the same name.

        Call :meth:`trim` afterwards. Raises ``OSError``.
        """
        _check(name)
        return NewFile(os.path.join(self.path, name), replace=True)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        _check(name)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._directory.fd)

    def age_s(self, name: str, now_s: float) -> float | None:
        """Returns the seconds since a file was created or last opened; None if it is missing."""
        _check(name)
        try:
            return now_s - os.stat(name, dir_fd=self._directory.fd, follow_symlinks=False).st_mtime
        except OSError:
            return None

    def trim(self) -> int:
        """Remove the least recently used files to meet the limit; return the remaining bytes."""
        files = []
        for name in os.listdir(self._directory.fd):
            with contextlib.suppress(OSError):  # another process has removed it
                status = os.stat(name, dir_fd=self._directory.fd, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    size = max(status.st_blocks * _BLOCK_BYTES, _LEAST_BYTES)
                    files.append((status.st_mtime_ns, name, size))
        total = sum(size for _, _, size in files)
        for _, name, size in sorted(files):
            if total <= self.max_bytes:
                break
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._directory.fd)
            total -= size
        return total

    def close(self) -> None:
        """Close the directory; idempotent. Garbage collection also closes the directory."""
        self._directory.close()


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a cached file")
