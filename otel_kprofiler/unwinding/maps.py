"""Accesses the maps shared by the BPF program and the table store."""

import enum
import errno
import mmap
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple, Self

from otel_kprofiler.bpf import (
    PAGE_BYTES,
    MappedWords,
    RingMemory,
    RingReader,
    create_inner_map,
    delete_from_map,
    update_map,
    write_pages,
)
from otel_kprofiler.model import FileKey

_STATE: Final = struct.Struct("=IIII")  # state, slot, serial, reserved


class FileState(enum.IntEnum):
    """The state of a file, as stored in the ``files`` map."""

    PENDING = 0
    """The file's table has been requested. Stack walks stop at a frame in this file."""
    LOADED = 1
    NO_TABLE = 2
    """The file has no unwind tables. The BPF program falls back to verified frame pointers."""
    UNAVAILABLE = 3
    """The file's tables are unusable. The BPF program does not fall back to frame pointers."""


class MapSizes(NamedTuple):
    """Maximum numbers of files and of loaded tables, and size of the request ring in bytes."""

    files: int
    slots: int
    ring_bytes: int


class Content(mmap.mmap):
    """Zeroed memory for a table's pages; forked children do not inherit it."""

    def __new__(cls, pages: int) -> Self:
        """Map ``pages`` pages of :data:`PAGE_BYTES`."""
        content = super().__new__(cls, -1, pages * PAGE_BYTES, mmap.MAP_PRIVATE)
        content.madvise(mmap.MADV_DONTFORK)
        return content


class TableMaps:
    """Accesses the BPF maps for files and tables. Methods are atomic with respect to each other.

    Duplicates the descriptors, because a thread that hangs in a file system may outlive the loaded
    object that owns the descriptors. Raises ``OSError`` if a map cannot be mapped into memory.
    """

    def __init__(self, map_fd: Callable[[str], int], sizes: MapSizes) -> None:
        self.sizes = sizes
        names = ("files", "tables", "file_requests")
        self._files, self._tables, self.ring_fd = (os.dup(map_fd(name)) for name in names)
        self._unpublished: set[int] = set()  # descriptors of inner maps that threads are filling
        self._pid = os.getpid()
        self._used = MappedWords(map_fd("table_used"), sizes.slots, writable=True)
        self._epoch = MappedWords(map_fd("table_epoch"), 1, writable=True)
        self.ring = RingReader(RingMemory(self.ring_fd, sizes.ring_bytes), sizes.ring_bytes)

    def publish_table(self, slot: int, content: Content) -> None:
        """Fill a free slot with a table, and wait until no program uses the old content.

        Raises ``OSError`` if the process lacks a capability, or memory is exhausted.
        """
        fd = create_inner_map(len(content) // PAGE_BYTES, "unwind_table")
        self._unpublished.add(fd)
        try:
            write_pages(fd, content)
            self._used.words[slot] = 0
            update_map(self._tables, slot.to_bytes(4, "little"), fd.to_bytes(4, "little"))
        finally:
            self._unpublished.remove(fd)
            os.close(fd)

    def remove_table(self, slot: int) -> None:
        """Empty a slot after :meth:`forget_file`; wait until no program uses the old content."""
        delete_from_map(self._tables, slot.to_bytes(4, "little"))

    def set_file(self, key: FileKey, state: FileState, slot: int = 0, serial: int = 0) -> None:
        """Set the state of a file. Raises ``OSError`` with ``E2BIG`` if the map is full."""
        update_map(self._files, key.pack(), _STATE.pack(state, slot, serial, 0))

    def forget_file(self, key: FileKey) -> None:
        """Forget a file; the BPF program requests its table again at the next sample."""
        with suppress(FileNotFoundError):
            delete_from_map(self._files, key.pack())

    def announce(self) -> None:
        """Invalidate the BPF program's mapping cache. Must not be called concurrently."""
        self._epoch.words[0] += 1

    def last_uses_ns(self) -> list[int]:
        """Returns the ``CLOCK_BOOTTIME`` of the last sample that used each slot; 0 if unused."""
        return self._used.words.tolist()

    def close(self) -> None:
        """Unmap memory and close descriptors.

        In a forked child, also closes the descriptors that the parent's threads were using.
        """
        self.ring.close()
        self._used.close()
        self._epoch.close()
        inherited = self._unpublished if os.getpid() != self._pid else ()
        for fd in (self._files, self._tables, self.ring_fd, *inherited):
            os.close(fd)


def is_out_of_memory(error: OSError) -> bool:
    """Returns whether an error means that the kernel lacks or refuses memory for a map."""
    return error.errno in (errno.ENOMEM, errno.E2BIG, errno.EPERM, errno.EMFILE, errno.ENFILE)
