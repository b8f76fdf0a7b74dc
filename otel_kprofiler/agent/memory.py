"""Keeps the memory footprint of a long-running process small."""

import ctypes
import gc
import mmap
import os
import re
from collections.abc import Iterator
from typing import Any, Final

# From malloc.h; see mallopt(3). C libraries other than glibc have no mallopt.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8
_THRESHOLD_BYTES: Final = 128 * 1024

_YOUNG_OBJECTS: Final = 100_000
"""Number of new objects that triggers a garbage collection. The number is high because most objects
belong to samples, which live until their window closes."""

# See proc_pid_smaps(5): for each mapping, a line as in maps, then fields in kB.
_MAPPING: Final = re.compile(
    rb"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<permissions>\S{4}) \S+ \S+ (?P<inode>\d+).*\n"
    rb"(?P<fields>(?:[A-Z]\w+:.*\n)*)",
    re.MULTILINE,
)
_PRIVATE: Final = re.compile(
    rb"^(?:Private_Dirty|Shared_Dirty|Anonymous|Swap): +(\d+) kB", re.MULTILINE
)
_UNWRITABLE: Final = (b"r-xp", b"r--p")

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_DONT_NEED: Final = ctypes.c_int(mmap.MADV_DONTNEED)

_PT_LOAD: Final = 1  # elf(5)
_PF_W: Final = 2


class _ProgramHeader(ctypes.Structure):
    """``Elf64_Phdr``; see elf(5)."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("physical_address", ctypes.c_uint64),
        ("file_size", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("alignment", ctypes.c_uint64),
    )


class _Library(ctypes.Structure):
    """The first fields of ``struct dl_phdr_info``; see dl_iterate_phdr(3)."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.POINTER(_ProgramHeader)),
        ("header_count", ctypes.c_uint16),
    )


_CALLBACK: Final = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p
)


def limit_allocator() -> None:
    """Make malloc return freed memory to the kernel. Call before threads start.

    By default, malloc creates an arena for each thread, although only one thread runs Python code
    at a time. When a large block is freed, malloc also raises its mmap threshold, so later large
    blocks come from the heap and fragment it.
    """
    mallopt = _find("mallopt")
    if mallopt:
        for option, value in (
            (_ARENA_MAX, 1),
            (_MMAP_THRESHOLD, _THRESHOLD_BYTES),
            (_TRIM_THRESHOLD, _THRESHOLD_BYTES),
        ):
            mallopt(option, value)


def settle() -> None:
    """Exempt all current objects from garbage collection, which is then enabled.

    Almost all objects are permanent, and finding the few others would take 20 ms of CPU time.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(_YOUNG_OBJECTS)
    give_back_memory()
    unmap_startup_pages()


def give_back_memory() -> None:
    """Return free memory to the kernel, if the C library supports it."""
    trim = _find("malloc_trim")
    if trim:
        trim(0)


def unmap_startup_pages() -> None:
    """Unmap library pages used only during startup, so that they no longer count as resident.

    Pages that are needed again are remapped from the page cache, without disk access. Mappings
    with private pages (proc_pid_smaps(5)), which differ from their files, are kept.
    """
    libc = ctypes.PyDLL(None)  # holds the GIL, so callbacks need not wait for it
    if not hasattr(libc, "dl_iterate_phdr"):
        return
    with open("/proc/self/smaps", "rb") as file:
        clean = set(find_clean_mappings(file.read()))

    def unmap(library: Any, *_: object) -> int:
        for start, end in _find_segments(library.contents):
            if (start, end) in clean:
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONT_NEED)
        return 0

    # No other thread may load a library now, because its mappings look clean until it is relocated.
    libc.dl_iterate_phdr(_CALLBACK(unmap), None)


def find_clean_mappings(smaps: bytes) -> Iterator[tuple[int, int]]:
    """Yields the address ranges of read-only file mappings without private pages."""
    for mapping in _MAPPING.finditer(smaps):
        permissions, inode, fields = mapping["permissions"], mapping["inode"], mapping["fields"]
        private = sum(map(int, _PRIVATE.findall(fields)))
        if permissions in _UNWRITABLE and inode != b"0" and not private:
            yield int(mapping["start"], 16), int(mapping["end"], 16)


def _find_segments(library: _Library) -> Iterator[tuple[int, int]]:
    for header in library.headers[: library.header_count]:
        if header.type == _PT_LOAD and not header.flags & _PF_W:
            start = library.address + header.address
            yield start & -_PAGE_BYTES, -(-(start + header.size) // _PAGE_BYTES) * _PAGE_BYTES


def read_resident_bytes(pid: int | str = "self") -> int:
    """Returns the resident set size of a process in bytes, from ``/proc/PID/statm``."""
    with open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def _find(function: str) -> Any:
    return getattr(ctypes.CDLL(None), function, None)
