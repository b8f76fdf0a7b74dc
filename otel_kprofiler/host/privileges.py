"""Giving up what a running sampler no longer needs: capabilities, and gaining any by exec.

The kernel keeps capabilities for each thread (capabilities(7), capset(2)). So every thread gives
up at its start all that its job, told by its name, does not need, and the thread that attached
the sampler does so afterwards. What was opened before goes on working.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.capabilities import CAPABILITIES, parse_capabilities

PURPOSES: Final = {
    "CAP_PERFMON": "sampling CPUs that come online later",
    "CAP_BPF": "BPF programs, when the kernel's records of them were lost",
    "CAP_SYSLOG": "symbols of modules that are loaded later",
    "CAP_SYS_PTRACE": "executables and contexts of other users' processes",
    "CAP_DAC_READ_SEARCH": "contexts of other users' processes; sections of modules loaded later",
}
"""What some thread keeps, and what for. Without one of them, that is what is missing."""

SAMPLING: Final = ("CAP_PERFMON", "CAP_SYSLOG", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH")
"""What the sampling thread keeps."""

JOBS: Final[Mapping[str, tuple[str, ...]]] = {
    "kprofiler-code": ("CAP_BPF", "CAP_PERFMON", "CAP_SYSLOG"),
    "kprofiler-modules": ("CAP_SYSLOG", "CAP_DAC_READ_SEARCH"),
    # /proc/PID/mem is readable for its owner only, whoever may trace the process.
    "kprofiler-contexts": ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"),
}
"""What other threads keep, by the beginning of their names; all that are not here: nothing."""

_VERSION_3: Final = 0x20080522
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_SET_NAME: Final = 15
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4

_T = TypeVar("_T")


class Privileges:
    """Keeps every thread of this process down to what it needs. Made before threads start.

    Args:
        drop_all: threads keep nothing at all.
    """

    def __init__(self, *, drop_all: bool = False) -> None:
        self._drop_all = drop_all
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        threading.setprofile(self._begin_thread)

    def close(self) -> None:
        """Let threads that start from now on keep what they inherit."""
        threading.setprofile(None)

    def reduce_this_thread(self) -> tuple[str, ...]:
        """Keep what the sampling thread needs; returns what is no longer there to be used.

        Raises:
            OSError: the kernel refused, which it does for no process that may run at all.
        """
        held = held_capabilities(_thread_status())
        keep_only(() if self._drop_all else SAMPLING)
        return tuple(name for name in PURPOSES if name in held) if self._drop_all else ()

    def _begin_thread(self, *_: Any) -> None:
        sys.setprofile(None)  # only wanted for the first event, which is the call of run()
        name = threading.current_thread().name
        job = next((kept for prefix, kept in JOBS.items() if name.startswith(prefix)), ())
        keep_only(() if self._drop_all else job)
        # So that /proc and debuggers can tell threads apart, which Python does from 3.14 on.
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode("utf-8", "replace")[:15], 0, 0, 0)


def run_unprivileged(function: Callable[[], _T]) -> _T:
    """Call a function in a thread that holds nothing, as will all threads that it starts.

    Also those that libraries make in C, which no hook of Python sees.
    """
    result: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            keep_only(())
            result.append(function())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
            failure.append(error)

    thread = threading.Thread(target=run, name="kprofiler-unprivileged")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def keep_only(names: Iterable[str]) -> None:
    """Have this thread hold no more than these capabilities, of those that it holds now.

    Raises:
        OSError: the kernel refused.
    """
    held = parse_capabilities(_thread_status()).effective
    mask = sum(1 << CAPABILITIES[name] for name in names) & held
    low, high = mask & 0xFFFFFFFF, mask >> 32
    # Effective, permitted, inheritable: the lower 32 of each, then the upper ones.
    header = ctypes.create_string_buffer(struct.pack("=Ii", _VERSION_3, 0))
    data = ctypes.create_string_buffer(struct.pack("=6I", low, low, 0, high, high, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(header, data):
        code = ctypes.get_errno()
        raise OSError(code, f"capset: {os.strerror(code)}")
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def held_capabilities(status: bytes) -> frozenset[str]:
    """Names of the effective capabilities in a ``/proc/PID/task/TID/status``, as far as known.

    Others are given as ``CAP_`` and their number.
    """
    effective = parse_capabilities(status).effective
    names = {number: name for name, number in CAPABILITIES.items()}
    return frozenset(
        names.get(number, f"CAP_{number}")
        for number in range(effective.bit_length())
        if effective >> number & 1
    )


def read_threads(files: HostFiles, pid: int | str = "self") -> dict[str, frozenset[str]]:
    """What each thread of a process holds, by ``TID name``, without threads that just end.

    Raises:
        OSError: there is no such process.
    """
    found = {}
    for tid in files.list_dir(f"/proc/{pid}/task"):
        try:
            status = files.read_bytes(f"/proc/{pid}/task/{tid}/status")
        except (FileNotFoundError, ProcessLookupError):
            continue
        name = status.partition(b"\n")[0].removeprefix(b"Name:\t").decode("utf-8", "replace")
        found[f"{tid} {name}"] = held_capabilities(status)
    return found


def _thread_status() -> bytes:
    with open("/proc/thread-self/status", "rb") as file:
        return file.read()


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl {option}: {os.strerror(code)}")
