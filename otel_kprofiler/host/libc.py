"""Calls C library functions that set ``errno``."""

import ctypes
import os


def call_libc(action: str, function: str, *arguments: object) -> int:
    """Call a function and return its result. ``OSError`` messages start with ``action``."""
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = getattr(libc, function)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{action}: {os.strerror(code)}")
    return result


def prctl(option: int, argument: int = 0) -> int:
    """Make the system call and return its result. Raises ``OSError`` on failure."""
    zero = ctypes.c_ulong(0)
    return call_libc(f"prctl {option}", "prctl", option, ctypes.c_ulong(argument), zero, zero, zero)
