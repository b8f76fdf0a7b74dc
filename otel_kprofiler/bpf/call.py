"""The bpf(2) system call."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from typing import Any, Final

_SYSCALLS: Final = {"x86_64": 321, "aarch64": 280}
_NUMBER: Final = ctypes.c_long(_SYSCALLS.get(platform.machine(), -1))
_libc = ctypes.CDLL(None, use_errno=True)


def bpf_call(command: int, attributes: Any) -> int:
    """Call bpf(2).

    Args:
        command: a value of ``enum bpf_cmd`` (include/uapi/linux/bpf.h).
        attributes: ``union bpf_attr`` as a ctypes object; the kernel may write to it.

    Returns:
        The result of the command: a descriptor, or 0.

    Raises:
        OSError: the kernel rejected the call, or bpf(2) is not supported on this architecture.
    """
    if _NUMBER.value < 0:
        raise OSError(errno.ENOSYS, f"bpf(2) is not supported on {platform.machine()}")
    result: int = _libc.syscall(
        _NUMBER, command, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"bpf command {command}: {os.strerror(code)}")
    return result
