"""Opens the host's files.

All files in ``/proc`` and ``/sys`` are opened here, so that tests can use captured files instead.
"""

import ctypes
import os
import struct
from typing import Final, Protocol

_OPENAT2: Final = 437  # on all architectures except alpha: include/uapi/asm-generic/unistd.h
_OPEN_HOW: Final = struct.Struct("=QQQ")  # flags, mode, resolve: include/uapi/linux/openat2.h
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10
_PIECE_BYTES: Final = 64 * 1024


class HostFiles(Protocol):
    """Reads a host's files by absolute path. Methods raise ``OSError`` on failure."""

    def open_fd(self, path: str) -> int:
        """Open a file for reading; the caller closes the descriptor."""

    def read_bytes(self, path: str) -> bytes:
        """Returns the whole content of a file."""

    def list_dir(self, path: str) -> list[str]:
        """Returns the names in a directory, sorted."""

    def read_link(self, path: str) -> str:
        """Returns the target of a symbolic link."""


class Access:
    """Opens files of this host, or of a captured tree below ``root``. Thread-safe."""

    def __init__(self, root: str = "/") -> None:
        self.root = root.rstrip("/")

    def open_fd(self, path: str) -> int:
        """Open a file for reading; the caller closes the descriptor."""
        return os.open(self.root + path, os.O_RDONLY | os.O_CLOEXEC)

    def read_bytes(self, path: str) -> bytes:
        """Returns the whole content of a file."""
        with open(self.open_fd(path), "rb", buffering=0) as file:
            return file.read()

    def list_dir(self, path: str) -> list[str]:
        """Returns the names in a directory, sorted."""
        return sorted(os.listdir(self.root + path))

    def read_link(self, path: str) -> str:
        """Returns the target of a symbolic link."""
        return os.readlink(self.root + path)

    def open_reference(self, path: str) -> int:
        """Open a file as a reference (``O_PATH``), which has no effect on the file."""
        return os.open(self.root + path, os.O_PATH | os.O_CLOEXEC)

    def open_reference_in(self, root: str, path: str) -> int:
        """Open a file as a reference, with its path and links resolved relative to ``root``.

        Fails on magic links (proc(5)). Requires kernel 5.6 (openat2(2)).
        """
        directory = os.open(self.root + root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return _open_in_root(directory, path, os.O_PATH | os.O_CLOEXEC)
        finally:
            os.close(directory)


def _open_in_root(directory: int, path: str, flags: int) -> int:
    how = _OPEN_HOW.pack(flags, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.syscall(
        ctypes.c_long(_OPENAT2), ctypes.c_int(directory), ctypes.c_char_p(os.fsencode(path)),
        ctypes.c_char_p(how), ctypes.c_size_t(len(how)),
    )  # fmt: skip
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return fd


def read_limited(files: HostFiles, path: str, most_bytes: int) -> bytes:
    """Read at most ``most_bytes`` bytes of a file. Raises ``OSError``."""
    fd = files.open_fd(path)
    try:
        return read_pieces(fd, most_bytes)
    finally:
        os.close(fd)


def read_pieces(fd: int, most_bytes: int) -> bytes:
    """Read at most ``most_bytes`` bytes from a descriptor, in chunks. Raises ``OSError``."""
    pieces, left = [], most_bytes
    while left and (piece := os.read(fd, min(left, _PIECE_BYTES))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
