"""Writes archives in the "newc" format, which the kernel unpacks as initramfs.

The kernel's ``Documentation/driver-api/early-userspace/buffer-format.rst`` describes the format.
The ``cpio`` tool is not used, because it may be missing and needs root to create device nodes.
"""

from __future__ import annotations

import stat

_TRAILER = "TRAILER!!!"


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


class Archive:
    """An archive that grows entry by entry. Directories must be added before their contents."""

    def __init__(self) -> None:
        self._content = bytearray()
        self._entries = 0

    def directory(self, path: str) -> None:
        self._add(path, stat.S_IFDIR | 0o755)

    def file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        self._add(path, stat.S_IFREG | mode, data)

    def character_device(self, path: str, major: int, minor: int) -> None:
        self._add(path, stat.S_IFCHR | 0o600, device=(major, minor))

    def finish(self) -> bytes:
        self._add(_TRAILER, 0)
        return bytes(self._content)

    def _add(
        self, path: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)
    ) -> None:
        self._entries += 1
        name = path.encode() + b"\0"
        # ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
        fields = (self._entries, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        self._content += _padded(header + name) + _padded(data)
