"""Runs a function as an unprivileged user with the given capabilities."""

from __future__ import annotations

import ctypes
import os
import pickle
import struct
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
NOBODY = 65534
# include/uapi/linux/capability.h, include/uapi/linux/prctl.h
CAPABILITIES = {"CAP_SYSLOG": 34, "CAP_PERFMON": 38, "CAP_BPF": 39}
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _AMBIENT_RAISE = 4, 8, 47, 2
_CAPABILITY_VERSION_3 = 0x20080522


def as_nobody(capabilities: Sequence[str], function: Callable[[], T]) -> T:
    """Calls ``function`` in a child with uid 65534 and ``capabilities``, and returns the result.

    Results and exceptions are pickled. Before the call, import the modules that ``function`` uses.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _become_nobody(capabilities)
            os.write(writer, pickle.dumps(_outcome(function)))
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, "the child died"
    value, error, trace = pickle.loads(data)
    if error is not None:
        error.add_note(trace)
        raise error
    return value


def _outcome(function: Callable[[], T]) -> tuple[T | None, BaseException | None, str]:
    try:
        return function(), None, ""
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        return None, error, traceback.format_exc()


def _become_nobody(capabilities: Sequence[str]) -> None:
    mask = sum(1 << CAPABILITIES[name] for name in capabilities)
    _prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    data = struct.pack("=6I", low, low, low, high, high, high)
    _checked(_libc.capset(header, data), "capset")
    for name in capabilities:
        _prctl(_PR_CAP_AMBIENT, _AMBIENT_RAISE, CAPABILITIES[name])
    # execve(2) would set this flag. Without it, the process could not read its /proc entry.
    _prctl(_PR_SET_DUMPABLE, 1)


_libc: Any = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(option, *padded), f"prctl {option}")


def _checked(status: int, what: str) -> None:
    if status:
        raise OSError(ctypes.get_errno(), what)
