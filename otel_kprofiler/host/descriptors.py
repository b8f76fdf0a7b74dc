"""Makes system calls for which a Python built for an old glibc has no functions."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from typing import Final

_PIDFD_SEND_SIGNAL: Final = 424  # include/uapi/asm-generic/unistd.h, except on alpha
_PIDFD_OPEN: Final = 434
_MFD_CLOEXEC: Final = 1  # include/uapi/linux/memfd.h


def open_pidfd(pid: int) -> int:
    """Open a process, as ``os.pidfd_open`` does; the caller closes the descriptor.

    Requires kernel 5.3. Raises ``OSError``.
    """
    in_python = getattr(os, "pidfd_open", None)
    if in_python is not None:
        return int(in_python(pid))
    libc = ctypes.CDLL(None, use_errno=True)
    return _check(libc.syscall(ctypes.c_long(_PIDFD_OPEN), ctypes.c_int(pid), ctypes.c_uint(0)))


def signal_pidfd(fd: int, number: signal.Signals) -> None:
    """Send a signal to a process, as ``signal.pidfd_send_signal`` does. Raises ``OSError``."""
    in_python = getattr(signal, "pidfd_send_signal", None)
    if in_python is not None:
        in_python(fd, number)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    word = ctypes.c_long
    _check(libc.syscall(word(_PIDFD_SEND_SIGNAL), word(fd), word(number), None, word(0)))


def create_memfd(name: str, flags: int = _MFD_CLOEXEC) -> int:
    """Create a file in memory, as ``os.memfd_create`` does; the caller closes the descriptor.

    Raises ``OSError``, also if glibc is older than 2.27.
    """
    in_python = getattr(os, "memfd_create", None)
    if in_python is not None:
        return int(in_python(name, flags))
    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)  # glibc 2.27, musl
    if create is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return _check(create(os.fsencode(name), ctypes.c_uint(flags)))


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
