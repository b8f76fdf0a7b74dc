"""Finds function starts and outermost functions, to check the stacks of any profiler.

Shares no code with the package's unwinder: pyelftools finds the segments, and this module reads
only the search table in ``.eh_frame_hdr`` and single entries in ``.eh_frame``.
"""

import bisect
import hashlib
import mmap
import os
import struct
from functools import cached_property
from pathlib import Path

from elftools.elf.elffile import ELFFile

_BLOCK = 4096
_ENTRY_BYTES = 64
"""Assumed size of entry-point code that has no unwind information, such as the dynamic linker's."""
_UNDEFINED_RETURN = b"\x07\x10"
"""DW_CFA_undefined for the x86-64 return address: the function has no caller."""


def file_hash(path: str) -> str:
    """Returns a file's ``process.executable.build_id.htlhash`` as defined in its specification."""
    with open(path, "rb") as file:
        head = file.read(_BLOCK)
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _BLOCK))
        tail = file.read(_BLOCK)
    return hashlib.sha256(head + tail + size.to_bytes(8, "big")).digest()[:16].hex()


class Functions:
    """The functions in an x86-64 file, read from its ``.eh_frame_hdr`` search table."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            elf = ELFFile(file)
            self._entry: int = elf["e_entry"]
            self._loads = [
                (part["p_vaddr"], part["p_filesz"], part["p_offset"])
                for part in elf.iter_segments("PT_LOAD")
            ]
            # Maps the file immediately, because a temporary file may be removed.
            self._content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            tables = list(elf.iter_segments("PT_GNU_EH_FRAME"))
            self._table_at = tables[0]["p_vaddr"] if tables else 0

    def _at(self, address: int) -> int:
        for start, size, offset in self._loads:
            if start <= address < start + size:
                return address - start + offset
        raise LookupError(hex(address))

    @cached_property
    def _table(self) -> list[tuple[int, int]]:
        """Returns the start of each function and the address of its unwind entry."""
        if not self._table_at:
            return []
        at = self._at(self._table_at)
        version, frame, count, encoding = self._content[at : at + 4]
        if (version, frame & 0x0F, count, encoding) != (1, 0x0B, 0x03, 0x3B):
            return []
        entries = struct.unpack_from("<I", self._content, at + 8)[0]
        base = self._table_at
        pairs = struct.iter_unpack("<ii", self._content[at + 12 : at + 12 + 8 * entries])
        return [(base + start, base + entry) for start, entry in pairs]

    def start(self, address: int) -> int:
        """Returns the start of the function at an address; the address itself if not found."""
        index = bisect.bisect_right(self._table, (address, 1 << 63)) - 1
        return self._table[index][0] if index >= 0 else address

    def is_outermost(self, address: int) -> bool:
        """Returns whether an address is in ``_start``, or in a function that has no caller."""
        if self._entry <= address < self._entry + _ENTRY_BYTES:
            return True
        index = bisect.bisect_right(self._table, (address, 1 << 63)) - 1
        if index < 0:
            return False
        at = self._at(self._table[index][1])
        length = struct.unpack_from("<I", self._content, at)[0]
        # Skips the length, the CIE pointer, the start and the size (four bytes each), and the
        # augmentation length.
        rules = self._content[at + 17 : at + 4 + length]
        return _UNDEFINED_RETURN in rules


class Files:
    """The mapped files of running processes, by hash."""

    def __init__(self) -> None:
        self._found: dict[str, Functions] = {}
        self._seen: set[str] = set()

    def look(self) -> None:
        """Adds the files currently mapped by processes."""
        for maps in Path("/proc").glob("[0-9]*/maps"):
            try:
                lines = maps.read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                fields = line.split(None, 5)
                if len(fields) < 6 or "x" not in fields[1] or fields[5] in self._seen:
                    continue
                self._seen.add(fields[5])
                if os.path.isfile(fields[5]):
                    self._found[file_hash(fields[5])] = Functions(fields[5])

    def get(self, file_id: str) -> Functions | None:
        return self._found.get(file_id)
