"""Maps BPF array maps into memory, so that accesses do not require system calls."""

import mmap


class MappedWords:
    """A BPF array map with ``BPF_F_MMAPABLE``, accessed as ``count`` 64-bit words."""

    def __init__(self, map_fd: int, count: int, *, writable: bool = False) -> None:
        size = 8 * count
        pages = -(-size // mmap.PAGESIZE)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapped = mmap.mmap(map_fd, pages * mmap.PAGESIZE, mmap.MAP_SHARED, access)
        self.words = memoryview(self._mapped)[:size].cast("Q")

    def copy(self) -> bytes:
        """Returns a copy of all words."""
        return bytes(self.words)

    def close(self) -> None:
        """Unmap the array."""
        self.words.release()
        self._mapped.close()
