"""A directory of files that can be made again, of bounded size."""

from __future__ import annotations

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
"""The least size that a file counts as, which bounds the number of empty files."""


def find_cache_path(environ: Mapping[str, str], user: int) -> str | None:
    """The directory of this program's caches; None if the user has none.

    ``CACHE_DIRECTORY`` is set by systemd (systemd.exec(5)), ``XDG_CACHE_HOME`` by the user (XDG
    Base Directory Specification). Otherwise it is in ``/var/cache`` for root, in ``~/.cache`` for
    others.
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
    """Files by name, of which those that were not used for longest are removed.

    Only files of this user in a directory that no other user can write are trusted. Several threads
    and processes may share the directory; a file that is removed remains readable for those who
    have opened it.

    Args:
        path: the directory; created if missing.
        max_bytes: most that its files take on disk, except for a moment.

    Raises:
        OSError: it cannot be created, or others can write it.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._directory = PrivateDirectory(path)
        weakref.finalize(self, self._directory.close)

    def open(self, name: str) -> int | None:
        """Open a file for reading; None if there is none that can be trusted.

        Raises:
            ValueError: the name is not that of a cached file.
        """
        _check(name)
        try:
            fd = self._directory.open(name, os.O_RDONLY)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(fd)
        return fd

    def create(self, name: str) -> NewFile:
        """A file that replaces that of the same name when finished; then call :meth:`trim`.

        Raises:
            ValueError: the name is not that of a cached file.
            OSError: it cannot be created.
        """
        _check(name)
        return NewFile(os.path.join(self.path, name), replace=True)

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        _check(name)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._directory.fd)

    def age_s(self, name: str, now_s: float) -> float | None:
        """Seconds of Unix time since a file was made or opened; None if there is none."""
        _check(name)
        try:
            return now_s - os.stat(name, dir_fd=self._directory.fd, follow_symlinks=False).st_mtime
        except OSError:
            return None

    def trim(self) -> int:
        """Remove files until the rest is within the limit; returns how many bytes they take."""
        files = []
        for name in os.listdir(self._directory.fd):
            with contextlib.suppress(OSError):  # another process has removed it
                found = os.stat(name, dir_fd=self._directory.fd, follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    size = max(found.st_blocks * _BLOCK_BYTES, _LEAST_BYTES)
                    files.append((found.st_mtime_ns, name, size))
        total = sum(size for _, _, size in files)
        for _, name, size in sorted(files):
            if total <= self.max_bytes:
                break
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._directory.fd)
            total -= size
        return total

    def close(self) -> None:
        """Close the directory, as the last reference to this does; idempotent."""
        self._directory.close()


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a cached file")
