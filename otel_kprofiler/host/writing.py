"""Writes files safely in directories that are writable by other users.

Anyone who can write to a directory can replace any of its entries with a link at any time. This
module therefore opens each directory once, resolves names relative to the directory without
following links, and writes content to a single descriptor.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable
from typing import Final

from otel_kprofiler.host.links import (
    UNTRUSTED_LINK,
    follow_links,
    is_magic,
    is_trusted,
    open_directory,
)

_NO_TMPFILE: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
"""Errors from file systems without ``O_TMPFILE`` (open(2))."""
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors from file systems without hard links, such as vfat."""
_NO_FILE: Final = "it is not a regular file"
_PLAIN: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


def write_all(fd: int, data: bytes) -> None:
    """Write all data to a descriptor; may block. Raises ``OSError`` on failure."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


class NewFile:
    """A file that appears under its name only when complete.

    Until :meth:`finish`, the file is nameless, or has a random name if the file system lacks
    ``O_TMPFILE``. If ``replace`` is set, an existing file with the final name is replaced. Symbolic
    links are followed as this user's permissions allow. Root follows only links that no other user
    could have created. The umask applies to ``mode``.

    Raises:
        OSError: the directory is not writable, or the name is taken and ``replace`` is not set.

    Attributes:
        path: path of the finished file, after following links.
        fd: descriptor for reading and writing; closed by :meth:`finish` and :meth:`abandon`.
    """

    def __init__(self, path: str, *, mode: int = 0o600, replace: bool = False) -> None:
        self._replace = replace
        self.path = followed = follow_links(path, is_root=os.geteuid() == 0)
        if is_magic(followed):
            raise OSError(errno.EINVAL, _NO_FILE)
        directory, self._name = os.path.split(followed)
        self._directory = open_directory(directory or ".")
        self._temporary = ""
        try:
            self._check_name(self._name)
            self.fd = self._open(mode)
        except BaseException:
            os.close(self._directory)
            raise

    def finish(self, other_names: Iterable[str] = ()) -> None:
        """Give the file its final name, close it, and update :attr:`path`.

        If the name is taken, try ``other_names`` in order. On ``OSError``, remove the file.
        """
        try:
            if not self._replace:
                self._link_first([self._name, *other_names])
                return
            if not self._temporary:
                name = self._random_name()
                self._link(name)
                self._temporary = name
            self._rename()
        finally:
            self.abandon()

    def _link_first(self, names: Iterable[str]) -> None:
        taken: FileExistsError | None = None
        for name in names:
            try:
                self._link(name)
            except FileExistsError as error:
                taken = taken or error
                continue
            self.path = os.path.join(os.path.dirname(self.path), name)
            return
        raise taken or FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def abandon(self) -> None:
        """Close and discard the file; idempotent."""
        if self.fd < 0:
            return
        if self._temporary:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary, dir_fd=self._directory)
        os.close(self.fd)
        os.close(self._directory)
        self.fd = -1

    def _check_name(self, name: str) -> None:
        try:
            there = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISLNK(there.st_mode):
            raise OSError(errno.ELOOP, UNTRUSTED_LINK)
        if stat.S_ISDIR(there.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not self._replace:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        if not stat.S_ISREG(there.st_mode):
            raise OSError(errno.EINVAL, _NO_FILE)

    def _open(self, mode: int) -> int:
        if os.path.isdir("/proc/self/fd"):
            try:
                flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
                return os.open(".", flags, mode, dir_fd=self._directory)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
        self._temporary = self._random_name()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _PLAIN
        return os.open(self._temporary, flags, mode, dir_fd=self._directory)

    def _random_name(self) -> str:
        return f".{self._name[:200]}.{secrets.token_hex(8)}"

    def _link(self, name: str) -> None:
        """Unlike a rename, a link never replaces a file."""
        # Linking through /proc needs no capability, unlike AT_EMPTY_PATH.
        source = self._temporary or f"/proc/self/fd/{self.fd}"
        try:
            os.link(
                source, name, src_dir_fd=self._directory, dst_dir_fd=self._directory,
                follow_symlinks=not self._temporary,
            )  # fmt: skip
        except OSError as error:
            if not self._temporary or error.errno not in _NO_LINKS:
                raise
            self._check_name(name)
            self._rename(name)

    def _rename(self, name: str = "") -> None:
        directory = self._directory
        os.replace(self._temporary, name or self._name, src_dir_fd=directory, dst_dir_fd=directory)
        self._temporary = ""


class AppendedFile:
    """A file that is appended to, and can be renamed and replaced by a new file.

    Args:
        path: path of the file, which is created if missing. The path may name a pipe or a device.
        mode: permissions of the file if it is created, before the umask is applied.

    Raises:
        OSError: the file cannot be opened, or another user could have replaced it with a link.

    Attributes:
        fd: descriptor for reading and appending; -1 when closed.
        movable: whether the file is a regular file with a name.
    """

    def __init__(self, path: str, *, mode: int = 0o600) -> None:
        self._path = followed = follow_links(path)
        self._magic = followed if is_magic(followed) else ""
        directory, self.name = os.path.split(followed)
        self._directory = os.open(directory or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fd = self._open(mode)
        except BaseException:
            os.close(self._directory)
            raise
        self.regular = stat.S_ISREG(os.fstat(self.fd).st_mode)
        self.movable = self.regular and not self._magic

    def is_in_place(self) -> bool:
        """Returns whether the path still refers to this file; True if the file cannot be moved."""
        try:
            return not self.movable or os.path.samestat(os.stat(self._path), os.fstat(self.fd))
        except OSError:
            return False

    def list_directory(self) -> list[str]:
        """Returns the names in this file's directory."""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._directory)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def sibling_exists(self, name: str) -> bool:
        """Returns whether a name exists in this file's directory."""
        try:
            os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def unlink_sibling(self, name: str) -> None:
        """Remove another file in this file's directory, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._directory)

    def move_to(self, name: str) -> None:
        """Rename the file within its directory, and open a new file under the old name."""
        fd = self.fd
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        # If the previous call could not open a new file, the file has already been renamed.
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.name, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self.fd = self._open(mode)
        os.close(fd)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self._directory)
            self.fd = -1

    def _open(self, mode: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        if self._magic:
            return os.open(self._magic, flags | os.O_CLOEXEC, mode)
        try:
            fd = os.open(self.name, flags | _PLAIN, mode, dir_fd=self._directory)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, UNTRUSTED_LINK) from None
            raise
        reason = self._find_reason_to_refuse(os.fstat(fd))
        if reason:
            os.close(fd)
            raise PermissionError(errno.EPERM, reason)
        return fd

    def _find_reason_to_refuse(self, opened: os.stat_result) -> str:
        """Returns why another user may have planted the file; "" if writing is safe."""
        if not stat.S_ISREG(opened.st_mode) or is_trusted(os.fstat(self._directory)):
            return ""
        if opened.st_nlink > 1:
            return "it has more than one hard link, in a directory that others can write to"
        if opened.st_uid not in (0, os.geteuid()):
            return f"it belongs to user {opened.st_uid}, in a directory that others can write to"
        return ""


class PrivateDirectory:
    """An open directory that only its owner can write to; created if missing.

    Missing directories are created, accessible only to their owner. Raises ``OSError``, or
    ``PermissionError`` if the directory belongs to another user or is writable by other users.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        _make_directories(path)
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        here = os.fstat(self.fd)
        reason = ""
        if here.st_uid != os.geteuid():
            reason = f"it belongs to user {here.st_uid}, not to {os.geteuid()}"
        elif here.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            reason = f"other users can write to it (mode {stat.S_IMODE(here.st_mode):04o})"
        if reason:
            os.close(self.fd)
            raise PermissionError(errno.EPERM, reason)

    def open(self, name: str, flags: int) -> int:
        """Open a regular file owned by this user; new files have mode 0600. Raises ``OSError``."""
        fd = os.open(name, flags | os.O_NONBLOCK | _PLAIN, 0o600, dir_fd=self.fd)
        opened = os.fstat(fd)
        if not stat.S_ISREG(opened.st_mode) or opened.st_uid != os.geteuid():
            os.close(fd)
            raise OSError(errno.EPERM, "not a regular file owned by this user")
        return fd

    def is_in_place(self) -> bool:
        """Returns whether the path still refers to this directory."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except OSError:
            return False

    def holds(self, name: str, fd: int) -> bool:
        """Returns whether ``name`` in the directory is still the file opened as ``fd``."""
        try:
            there = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(fd))

    def sync(self) -> None:
        """Flush the directory's entries to disk."""
        os.fsync(self.fd)

    def close(self) -> None:
        """Close the directory; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _make_directories(path: str) -> None:
    """Create directories like ``os.makedirs``, but accessible only to their owner."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent and parent != path:
        _make_directories(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
