"""Keeps the memory of a long-running process small."""

from __future__ import annotations

import ctypes
import gc
import os
from typing import Any, Final

# malloc.h, see mallopt(3); C libraries other than glibc have no mallopt.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8
_THRESHOLD_BYTES: Final = 128 * 1024

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def limit_allocator() -> None:
    """Make malloc return freed memory to the kernel; call before threads start.

    By default every thread gets an arena, although only one thread runs Python at a time; and
    after a large block was freed, later blocks of that size come from the heap and fragment it.
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
    """Exclude all present objects from garbage collection; they live as long as the process."""
    gc.collect()
    gc.freeze()
    give_back_memory()


def give_back_memory() -> None:
    """Return free memory to the kernel, if the C library supports it."""
    trim = _find("malloc_trim")
    if trim:
        trim(0)


def read_resident_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process in bytes, from ``/proc/PID/statm``."""
    with open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def _find(function: str) -> Any:
    return getattr(ctypes.CDLL(None), function, None)
