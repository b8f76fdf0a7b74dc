"""The maps that the BPF program and the store of tables share."""

from __future__ import annotations

import enum
import errno
import mmap
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from otel_kprofiler.bpf import (
    PAGE_BYTES,
    RingMemory,
    RingReader,
    create_inner_map,
    delete_from_map,
    update_map,
)
from otel_kprofiler.model import FileKey

_STATE: Final = struct.Struct("=IIII")  # state, slot, serial, reserved
_WORD_BYTES: Final = 8


class FileState(enum.IntEnum):
    """The state of a file in the map ``files``."""

    PENDING = 0
    """Asked for; the walk of a stack stops there."""
    LOADED = 1
    NO_TABLE = 2
    """The file has no unwind tables at all; verified frame pointers are tried."""
    UNAVAILABLE = 3
    """It has tables, or may have, that cannot be used; a frame pointer would be a guess."""


class MapSizes(NamedTuple):
    """Entries of the maps.

    Attributes:
        files: that the program can hold.
        slots: tables that can be loaded.
        ring_bytes: of the ring of requests.
    """

    files: int
    slots: int
    ring_bytes: int


class TableMaps:
    """Access to the maps; each method is one step that is safe beside the others.

    Args:
        map_fd: gives the descriptor of a map by name. They belong to the loaded object; what is
            kept are duplicates, since a thread that hangs in a file system may outlive it.
        sizes: as the object was loaded.

    Raises:
        OSError: a map could not be mapped into memory.
    """

    def __init__(self, map_fd: Callable[[str], int], sizes: MapSizes) -> None:
        self.sizes = sizes
        names = ("files", "tables", "file_requests")
        self._files, self._tables, self.ring_fd = (os.dup(map_fd(name)) for name in names)
        self._used = _Words(map_fd("table_used"), sizes.slots)
        self._epoch = _Words(map_fd("table_epoch"), 1)
        self.ring = RingReader(RingMemory(self.ring_fd, sizes.ring_bytes), sizes.ring_bytes)

    def create(self, pages: int, fill: Callable[[memoryview], None]) -> int:
        """Create an inner map and have it filled; a descriptor, which the caller closes.

        Its memory is mapped only meanwhile, so that none of it counts as this process's.

        Raises:
            OSError: no right, or no memory.
        """
        fd = create_inner_map(pages, "unwind_table")
        try:
            mapped = mmap.mmap(fd, pages * PAGE_BYTES)
            with memoryview(mapped) as view:
                fill(view)
            mapped.close()  # not after an error, whose traceback may hold parts of the view
        except BaseException:
            os.close(fd)
            raise
        return fd

    def publish_table(self, slot: int, fd: int) -> None:
        """Put a table into a free slot. Waits until no program sees what was there before."""
        self._used.words[slot] = 0
        update_map(self._tables, slot.to_bytes(4, "little"), fd.to_bytes(4, "little"))

    def remove_table(self, slot: int) -> None:
        """Empty a slot, whose file must have been forgotten. Waits as :meth:`publish_table`."""
        delete_from_map(self._tables, slot.to_bytes(4, "little"))

    def set_file(self, key: FileKey, state: FileState, slot: int = 0, serial: int = 0) -> None:
        """Announce a file to the program. Raises ``OSError`` with ``E2BIG`` if it is full."""
        update_map(self._files, key.pack(), _STATE.pack(state, slot, serial, 0))

    def forget_file(self, key: FileKey) -> None:
        """Have the program ask for a file again when it next meets it."""
        with suppress(FileNotFoundError):
            delete_from_map(self._files, key.pack())

    def announce(self) -> None:
        """Have the program drop what it remembers of mappings; for one thread at a time."""
        self._epoch.words[0] += 1

    def last_uses_ns(self) -> list[int]:
        """Boot time of the last sample that used the table of each slot; 0 if none has."""
        return self._used.words.tolist()

    def close(self) -> None:
        """Unmap and close."""
        self.ring.close()
        self._used.close()
        self._epoch.close()
        for fd in (self._files, self._tables, self.ring_fd):
            os.close(fd)


class _Words:
    """An array of 64-bit words, mapped."""

    def __init__(self, map_fd: int, count: int) -> None:
        size = -(-count * _WORD_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._mapped = mmap.mmap(map_fd, size)
        self.words = memoryview(self._mapped)[: count * _WORD_BYTES].cast("Q")

    def close(self) -> None:
        self.words.release()
        self._mapped.close()


def is_out_of_memory(error: OSError) -> bool:
    """Returns whether the kernel had no memory, or allowed none, for a map."""
    return error.errno in (errno.ENOMEM, errno.E2BIG, errno.EPERM, errno.EMFILE, errno.ENFILE)
