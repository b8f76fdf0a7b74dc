"""Memory of a process that runs for months: how it is kept, and when it is given back."""

from __future__ import annotations

import ctypes
import gc
import os
from typing import Any, Final

# malloc.h; see mallopt(3). They are only hints: other C libraries have no mallopt.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8
_THRESHOLD_BYTES: Final = 128 * 1024

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def limit_allocator() -> None:
    """Keep freed memory from staying with the process; to be called before threads start.

    By default each thread has an arena of its own, though one thread at a time runs Python, and
    once a large block was freed the next ones of that size come from the heap and hole it.
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
    """What there is now will stay: collections of garbage need not look at it again."""
    gc.collect()
    gc.freeze()
    give_back_memory()


def give_back_memory() -> None:
    """Have the C library return free memory to the kernel, where it can."""
    trim = _find("malloc_trim")
    if trim:
        trim(0)


def read_resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is in RAM, by ``/proc/PID/statm``."""
    with open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def _find(function: str) -> Any:
    return getattr(ctypes.CDLL(None), function, None)
