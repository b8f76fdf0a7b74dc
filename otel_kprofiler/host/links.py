"""Decides which symbolic links to follow when writing a file.

For root, only links that no other user can have created are followed, in every directory of a path.
For other users, all links that the kernel allows are followed, because following a link grants no
additional permissions.
"""

import errno
import os
import stat
from typing import Final

UNTRUSTED_LINK: Final = "it is a symbolic link that other users can change"
_MAX_LINKS: Final = 40  # as in the kernel (include/linux/namei.h: MAXSYMLINKS)
_MAX_NAMES: Final = 4096 * _MAX_LINKS
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def follow_links(path: str, *, is_root: bool = True) -> str:
    """Resolve the symbolic links in a path's last component.

    If ``is_root``, follows a link only if nobody but root and this user can have created it.
    Without ``is_root``, applies the rules of ``fs.protected_symlinks``.
    """
    for _ in range(_MAX_LINKS):
        try:
            link = os.lstat(path)
        except FileNotFoundError:
            return path
        if not stat.S_ISLNK(link.st_mode) or is_magic(path):
            return path
        directory = os.path.dirname(path)
        there = os.stat(directory or ".")
        if not is_trusted(there, link) and (is_root or _is_protected(there, link)):
            return path
        path = os.path.join(directory, os.readlink(path))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def open_directory(path: str) -> int:
    """Open a directory with ``O_PATH``; the caller closes the descriptor. Raises ``OSError``.

    For root, follows only links that no other user can have created.
    """
    if os.geteuid() != 0:
        return os.open(path, _DIRECTORY)
    rest = path.split("/")[::-1]
    here = os.open("/" if path.startswith("/") else ".", _DIRECTORY)
    for _ in range(_MAX_NAMES):
        if not rest:
            return here
        try:
            below = _open_next(here, rest)
        finally:
            os.close(here)
        here = below
    os.close(here)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _open_next(here: int, rest: list[str]) -> int:
    """Open the next directory in a path, after expanding a symbolic link into ``rest``."""
    name, flags = rest.pop() or ".", _DIRECTORY | os.O_NOFOLLOW
    link = os.stat(name, dir_fd=here, follow_symlinks=False)
    if stat.S_ISLNK(link.st_mode) and link.st_dev == os.stat("/proc/self/").st_dev:
        flags = _DIRECTORY  # the target of a magic link is not a path
    elif stat.S_ISLNK(link.st_mode):
        if not is_trusted(os.fstat(here), link):
            raise OSError(errno.ELOOP, UNTRUSTED_LINK)
        target = os.readlink(name, dir_fd=here)
        rest += target.split("/")[::-1]
        name = "/" if target.startswith("/") else "."
    return os.open(name, flags, dir_fd=here)


def is_magic(path: str) -> bool:
    """Returns whether a path is a magic link in /proc (proc(5)), whose target is not a path."""
    try:
        link = os.lstat(path)
        return stat.S_ISLNK(link.st_mode) and link.st_dev == os.stat("/proc/self/").st_dev
    except OSError:
        return False


def is_trusted(directory: os.stat_result, entry: os.stat_result | None = None) -> bool:
    """Returns whether only root or this user could have created a directory entry."""
    trusted = (0, os.geteuid())
    if directory.st_uid not in trusted or (entry and entry.st_uid not in trusted):
        return False
    shared = directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    # In a sticky directory, only the owners of directory and entry can replace the entry.
    return not shared or bool(entry and directory.st_mode & stat.S_ISVTX)


def _is_protected(directory: os.stat_result, link: os.stat_result) -> bool:
    """Returns whether the kernel refuses to follow a link (fs/namei.c: may_follow_link)."""
    sticky = stat.S_ISVTX | stat.S_IWOTH
    is_shared = directory.st_mode & sticky == sticky
    return is_shared and link.st_uid not in (os.geteuid(), directory.st_uid)
