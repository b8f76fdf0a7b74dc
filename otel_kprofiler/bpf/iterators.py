"""Runs BPF programs that iterate over the kernel's tasks, mappings, programs or symbols."""

import ctypes
import os
from typing import Final

from otel_kprofiler.bpf.call import bpf_call

# enum bpf_cmd, enum bpf_attach_type in include/uapi/linux/bpf.h
_LINK_CREATE: Final = 28
_ITER_CREATE: Final = 33
_TRACE_ITER: Final = 28


class _IterateTask(ctypes.Structure):
    """``union bpf_iter_link_info`` for tasks: ``tid``, ``pid``, ``pid_fd``."""

    _fields_ = (("tid", ctypes.c_uint32), ("pid", ctypes.c_uint32), ("pid_fd", ctypes.c_uint32))


class _LinkAttributes(ctypes.Structure):
    """``union bpf_attr`` for BPF_LINK_CREATE with an iterator."""

    _fields_ = (
        ("program_fd", ctypes.c_uint32),
        ("target_fd", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("info", ctypes.c_void_p),
        ("info_bytes", ctypes.c_uint32),
    )


def link_iterator(program_fd: int, pid: int = 0, *, tid: int = 0) -> int:
    """Link an iterator program, and return a descriptor, which the caller closes.

    The iterator visits all tasks or, since Linux 6.1, only the process or thread with the given id
    in this process's pid namespace. Raises ``OSError``.
    """
    attributes = _LinkAttributes(program_fd, 0, _TRACE_ITER, 0)
    task = _IterateTask(tid, 0 if tid else pid, 0)
    if pid or tid:
        attributes.info = ctypes.addressof(task)
        attributes.info_bytes = ctypes.sizeof(task)
    return bpf_call(_LINK_CREATE, attributes)


def open_iterator(link: int) -> int:
    """Start an iteration. Reading the returned descriptor runs the program. Raises ``OSError``."""
    return bpf_call(_ITER_CREATE, (ctypes.c_uint32 * 2)(link, 0))


def iterate(program_fd: int, pid: int = 0) -> int:
    """Link an iterator program and start an iteration; see :func:`open_iterator`."""
    link = link_iterator(program_fd, pid)
    try:
        return open_iterator(link)
    finally:
        os.close(link)
