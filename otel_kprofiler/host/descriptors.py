"""Makes system calls that Python does not wrap when built against an old glibc."""

import ctypes
import errno
import os
import signal
from typing import Final

from otel_kprofiler.host.libc import call_libc

_PIDFD_SEND_SIGNAL: Final = 424  # include/uapi/asm-generic/unistd.h, except on alpha
_PIDFD_OPEN: Final = 434
_MFD_CLOEXEC: Final = 1  # include/uapi/linux/memfd.h


def open_pidfd(pid: int) -> int:
    """Open a pidfd, as ``os.pidfd_open`` does; the caller closes the descriptor.

    Requires Linux 5.3 or later. Raises ``OSError``.
    """
    in_python = getattr(os, "pidfd_open", None)
    if in_python is not None:
        return int(in_python(pid))
    word = ctypes.c_long
    return call_libc("pidfd_open", "syscall", word(_PIDFD_OPEN), word(pid), word(0))


def signal_pidfd(fd: int, number: signal.Signals) -> None:
    """Send a signal to a process, as ``signal.pidfd_send_signal`` does. Raises ``OSError``."""
    in_python = getattr(signal, "pidfd_send_signal", None)
    if in_python is not None:
        in_python(fd, number)
        return
    word = ctypes.c_long
    arguments = word(_PIDFD_SEND_SIGNAL), word(fd), word(number), None, word(0)
    call_libc("pidfd_send_signal", "syscall", *arguments)


def create_memfd(name: str, flags: int = _MFD_CLOEXEC) -> int:
    """Create a file in memory, as ``os.memfd_create`` does; the caller closes the descriptor.

    Raises ``OSError`` on failure, or if glibc is older than 2.27.
    """
    in_python = getattr(os, "memfd_create", None)
    if in_python is not None:
        return int(in_python(name, flags))
    try:
        return call_libc("memfd_create", "memfd_create", os.fsencode(name), ctypes.c_uint(flags))
    except AttributeError as error:  # glibc 2.27 and musl have the function
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from error


def open_in_memory(name: str, content: bytes) -> int:
    """Open an in-memory file with this content, positioned at its start; the caller closes it.

    Raises ``OSError``.
    """
    descriptor = create_memfd(name)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
