"""Opens special files (devices, FIFOs, sockets) and descriptors in ``/proc``."""

import errno
import os
import re
import socket
import stat
from typing import Final

from otel_kprofiler.host.links import follow_links, is_magic, is_trusted

_OWN_DESCRIPTOR: Final = re.compile(r"/proc/(?:self|thread-self)/fd/(\d+)")


def open_special(path: str) -> int | None:
    """Open a path for writing if it is a special file; None if it is missing or a regular file.

    Opening a FIFO blocks until it has a reader. The caller closes the descriptor. Raises
    ``OSError`` on failure, or if the caller is root and another user could have created the file.
    """
    followed = follow_links(path, is_root=os.geteuid() == 0)
    if is_magic(followed):
        descriptor = _OWN_DESCRIPTOR.fullmatch(os.path.abspath(followed))
        # Duplicate this process's descriptor. Sockets cannot be reopened, and a reopened file would
        # be written from its start.
        return (
            os.dup(int(descriptor[1]))
            if descriptor
            else os.open(followed, os.O_WRONLY | os.O_CLOEXEC)
        )
    try:
        there = os.lstat(followed)
    except FileNotFoundError:
        return None
    if any(is_kind(there.st_mode) for is_kind in (stat.S_ISREG, stat.S_ISLNK, stat.S_ISDIR)):
        return None
    directory = os.stat(os.path.dirname(followed) or ".")
    if os.geteuid() == 0 and not is_trusted(directory) and there.st_uid != 0:
        reason = f"it belongs to user {there.st_uid}, in a directory that others can write to"
        raise PermissionError(errno.EPERM, reason)
    if stat.S_ISSOCK(there.st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
            connected.connect(followed)
            return connected.detach()
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW
    return os.open(followed, flags)
