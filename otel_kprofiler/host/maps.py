r"""Reads the mappings of a process from ``/proc/PID/maps`` (proc_pid_maps(5)).

Since Linux 6.11, ``PROCMAP_QUERY`` (include/uapi/linux/fs.h) returns the mapping at an address,
with the build id of its file.

In ``/proc/PID/maps``, ``\012`` stands for a newline in a path, and a deleted file has the suffix
`` (deleted)``. An actual file name may also contain ``\012`` or `` (deleted)``.
"""

import ctypes
import errno
import fcntl
import os
import re
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from otel_kprofiler.host.access import Access, HostFiles, read_limited, read_pieces
from otel_kprofiler.model import VDSO_NAME, BuildId

MAX_MAPS_BYTES: Final = 16 << 20
"""Limit on the size of ``/proc/PID/maps``: about 150,000 mappings (kernel default: 65,530)."""
MINOR_BITS: Final = 20  # MKDEV, include/linux/kdev_t.h
DELETED: Final = " (deleted)"
_LINES: Final = [
    re.compile(
        rb"^([0-9a-f]{1,16})-([0-9a-f]{1,16}) ([r-][w-][%s][ps]) ([0-9a-f]{1,16})"
        rb" ([0-9a-f]{1,8}):([0-9a-f]{1,8}) ([0-9]{1,20}) *+([^\n]*+)\n" % executable,
        re.MULTILINE,
    )
    for executable in (b"x-", b"x")
]

# struct procmap_query: size, flags, address; start, end, flags, page size, offset, inode, major,
# minor; sizes of the buffers for path and build id, and their addresses.
_QUERY: Final = struct.Struct("=QQQQQQQQQIIIIQQ")
_PROCMAP_QUERY: Final = 3 << 30 | _QUERY.size << 16 | ord("f") << 8 | 17  # _IOWR('f', 17, …)
_LETTERS: Final = ((1, "r"), (2, "w"), (4, "x"))
_SHARED: Final = 8
_PATH_BYTES: Final = 4096  # PATH_MAX, the most that the kernel writes
_BUILD_ID_BYTES: Final = 20  # BUILD_ID_SIZE_MAX
_NOTHING_THERE: Final = (errno.ENOENT, errno.ESRCH)


class MemoryMapping(NamedTuple):
    """A mapping in a process's address space.

    Attributes:
        permissions: permissions in the form ``r-xp``.
        file_offset: offset in the file of the byte mapped at ``start``.
        device: device of the file's inode, as ``MKDEV`` (major << 20 | minor); 0 if there is no
            file.
        inode: inode number of the file; 0 if there is no file.
        path: path of the file, without `` (deleted)``. For a mapping without a file, a name such as
            ``[heap]``, or empty.
        deleted: whether the file no longer has a directory entry.
    """

    start: int
    end: int
    permissions: str
    file_offset: int
    device: int
    inode: int
    path: str
    deleted: bool

    @property
    def is_executable(self) -> bool:
        """Returns whether the mapping is executable."""
        return "x" in self.permissions


class FoundMapping(NamedTuple):
    """The mapping at an address, and its file's GNU build id if the kernel provides it."""

    mapping: MemoryMapping
    build_id: BuildId | None


def parse_mappings(maps: bytes, *, only_code: bool = False) -> Iterator[MemoryMapping]:
    """Parses the text of ``/proc/PID/maps``, in address order.

    Skips malformed lines and, if ``only_code``, mappings that are not executable.
    """
    for match in _LINES[only_code].finditer(maps):
        start, end, permissions, offset, major, minor, inode, path = match.groups()
        yield MemoryMapping(
            int(start, 16), int(end, 16), permissions.decode("ascii"), int(offset, 16),
            int(major, 16) << MINOR_BITS | int(minor, 16), int(inode),
            *_split_path(path.replace(rb"\012", b"\n")),
        )  # fmt: skip


def read_maps(files: HostFiles, pid: int | str) -> bytes:
    """Read ``/proc/PID/maps``, at most :data:`MAX_MAPS_BYTES`. Raises ``OSError``."""
    return read_limited(files, f"/proc/{pid}/maps", MAX_MAPS_BYTES)


def find_vdso(files: HostFiles) -> bytes | None:
    """Read the vDSO, an ELF file, from this process's memory; None if there is no vDSO.

    Raises ``OSError`` if this process's maps cannot be read.
    """
    for mapping in parse_mappings(read_maps(files, "self")):
        if mapping.path == VDSO_NAME:
            return ctypes.string_at(mapping.start, mapping.end - mapping.start)
    return None


class ProcessMaps:
    """Looks up a process's mappings by address. Not thread-safe.

    Finds no mappings once the process has exited or executed a different program. Raises
    ``OSError`` if there is no such process, or if the caller is not permitted to trace it
    (ptrace(2), PTRACE_MODE_READ).
    """

    def __init__(self, pid: int, files: HostFiles | None = None) -> None:
        self._fd = (files or Access()).open_fd(f"/proc/{pid}/maps")
        self._can_query = True
        self._path = ctypes.create_string_buffer(_PATH_BYTES)
        self._build_id = ctypes.create_string_buffer(_BUILD_ID_BYTES)
        self._buffers = ctypes.addressof(self._path), ctypes.addressof(self._build_id)

    def find(self, address: int) -> FoundMapping | None:
        """Returns the current mapping at an address; None if nothing is mapped there.

        Raises ``OSError``. If anonymous executable memory exactly fills a hole in a file's
        mappings, the process has moved the file's text into this memory. Memory with moved text is
        returned as a mapping of the file.

        To provide the build id, the kernel reads the file's first page, so this call may block on
        disk I/O. On kernels before 6.11, all mappings are read, without build ids.
        """
        result = self._find(address)
        if result is None or result.mapping.inode or result.mapping.path:
            return result
        mapping = result.mapping
        if mapping.is_executable:
            around = self._find(mapping.start - 1), self._find(mapping.end)
            if around[0] and around[1] and _is_hole(around[0].mapping, mapping, around[1].mapping):
                previous = around[0].mapping
                offset = previous.file_offset + mapping.start - previous.start
                moved = previous._replace(
                    start=mapping.start, end=mapping.end, permissions=mapping.permissions,
                    file_offset=offset,
                )  # fmt: skip
                return FoundMapping(moved, around[0].build_id)
        return result

    def _find(self, address: int) -> FoundMapping | None:
        if not 0 <= address < 1 << 64:
            return None
        try:
            if self._can_query:
                return self._query(address)
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return None
            if error.errno not in (errno.ENOTTY, errno.ENAMETOOLONG):
                raise
            self._can_query = error.errno != errno.ENOTTY
        return self._find_in_text(address)

    def close(self) -> None:
        """Close the descriptor; call once."""
        os.close(self._fd)

    def _find_in_text(self, address: int) -> FoundMapping | None:
        try:
            os.lseek(self._fd, 0, os.SEEK_SET)
            text = read_pieces(self._fd, MAX_MAPS_BYTES)
        except ProcessLookupError:
            return None
        for mapping in parse_mappings(text):
            if mapping.start <= address < mapping.end:
                return FoundMapping(mapping, None)
        return None

    def _query(self, address: int) -> FoundMapping:
        query = bytearray(_QUERY.size)
        _QUERY.pack_into(
            query, 0, _QUERY.size, 0, address, 0, 0, 0, 0, 0, 0, 0, 0,
            _PATH_BYTES, _BUILD_ID_BYTES, *self._buffers,
        )  # fmt: skip
        fcntl.ioctl(self._fd, _PROCMAP_QUERY, query)
        (
            _, _, _, start, end, flags, _, offset, inode, major, minor, path_size, id_size, _, _
        ) = _QUERY.unpack(query)  # fmt: skip
        permissions = "".join(letter if flags & bit else "-" for bit, letter in _LETTERS)
        permissions += "s" if flags & _SHARED else "p"
        device = major << MINOR_BITS | minor
        path = ctypes.string_at(self._buffers[0], max(path_size - 1, 0))  # excludes the final null
        mapping = MemoryMapping(start, end, permissions, offset, device, inode, *_split_path(path))
        build_id = ctypes.string_at(self._buffers[1], id_size).hex()
        return FoundMapping(mapping, BuildId(build_id) if build_id else None)


def _is_hole(previous: MemoryMapping, hole: MemoryMapping, next_mapping: MemoryMapping) -> bool:
    """Returns whether ``hole`` exactly fills the gap between two mappings of the same file."""
    return (
        previous.inode != 0
        and (previous.device, previous.inode) == (next_mapping.device, next_mapping.inode)
        and (previous.end, hole.end) == (hole.start, next_mapping.start)
        and next_mapping.file_offset - previous.file_offset == next_mapping.start - previous.start
    )


def _split_path(shown: bytes) -> tuple[str, bool]:
    """Returns the path, and whether the kernel marks the file as deleted."""
    path = os.fsdecode(shown)
    kept = path.removesuffix(DELETED)
    return kept, kept != path
