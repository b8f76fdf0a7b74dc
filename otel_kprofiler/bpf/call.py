"""The bpf(2) system call."""

import ctypes
import errno
import os
import platform
from typing import Any, Final

_SYSCALLS: Final = {"x86_64": 321, "aarch64": 280}
_NUMBER: Final = ctypes.c_long(_SYSCALLS.get(platform.machine(), -1))
_libc = ctypes.CDLL(None, use_errno=True)


def bpf_call(command: int, attributes: Any) -> int:
    """Call bpf(2), and return its result: a descriptor or 0. Raises ``OSError``.

    ``attributes`` is ``union bpf_attr`` (include/uapi/linux/bpf.h), to which the kernel may write.
    """
    if _NUMBER.value < 0:
        raise OSError(errno.ENOSYS, f"bpf(2) is not supported on {platform.machine()}")
    result: int = _libc.syscall(
        _NUMBER, command, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"bpf(2) command {command} failed: {os.strerror(code)}")
    return result
