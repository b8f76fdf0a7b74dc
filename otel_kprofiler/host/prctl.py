"""Calls prctl(2)."""

from __future__ import annotations

import ctypes
import os


def prctl(option: int, argument: int = 0) -> int:
    """Make the system call and return its result. Raises ``OSError``, for example in a sandbox."""
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    result: int = libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl {option}: {os.strerror(code)}")
    return result
