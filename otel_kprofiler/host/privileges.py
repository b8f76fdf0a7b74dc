"""Drops capabilities that a running agent no longer needs, and keeps exec from granting new ones.

Capabilities are per thread (capabilities(7), capset(2)). On startup, every thread drops the
capabilities that its job does not need. A thread's job is identified by its name. The thread that
attaches the sampler drops unneeded capabilities afterwards. Open descriptors remain usable.
"""

import ctypes
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from otel_kprofiler.errors import HostError
from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.capabilities import CAPABILITIES, CONTEXTS, parse_capabilities
from otel_kprofiler.host.libc import call_libc, prctl

PURPOSES: Final = {
    "CAP_PERFMON": "sampling CPUs that come online later",
    "CAP_BPF": "unwind tables, and BPF programs whose kernel records were lost",
    "CAP_SYSLOG": "symbols of modules loaded later",
    "CAP_SYS_PTRACE": "executables, contexts and unwind tables of other users' processes",
    "CAP_DAC_READ_SEARCH": "contexts of other users' processes, sections of modules loaded later, "
    "unwind tables of files that others may not read, and reloading such a configuration",
    "CAP_CHECKPOINT_RESTORE": "unwind tables of libraries that were deleted or replaced",
}
"""Capabilities that threads keep, each with the features that require the capability."""

SAMPLING: Final = ("CAP_PERFMON", "CAP_SYSLOG", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH")
"""Capabilities that the sampling thread keeps."""

JOBS: Final[Mapping[str, tuple[str, ...]]] = {
    "kprofiler-ksymbols": ("CAP_BPF", "CAP_PERFMON", "CAP_SYSLOG"),
    "kprofiler-modules": ("CAP_SYSLOG", "CAP_DAC_READ_SEARCH"),
    "kprofiler-contexts": CONTEXTS,
    "kprofiler-config": ("CAP_DAC_READ_SEARCH",),
    "kprofiler-files": ("CAP_BPF",),
    "kprofiler-python": (
        "CAP_BPF",
        "CAP_PERFMON",
        "CAP_SYS_PTRACE",
        "CAP_DAC_READ_SEARCH",
        "CAP_CHECKPOINT_RESTORE",
    ),
    "kprofiler-tables": (
        "CAP_BPF",
        "CAP_SYS_PTRACE",
        "CAP_DAC_READ_SEARCH",
        "CAP_CHECKPOINT_RESTORE",
    ),
}
"""Capabilities kept by threads other than the sampling thread, by thread name prefix. Unlisted
threads keep no capabilities."""

_VERSION_3: Final = 0x20080522
_SETS: Final = struct.Struct("=6I")
"""The lower halves of the effective, permitted and inheritable sets, then their upper halves."""
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_SET_NAME: Final = 15
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4

_T = TypeVar("_T")


class Privileges:
    """Limits every thread of this process to the capabilities that the thread needs.

    Create the object before starting any thread. With ``drop_all``, threads keep no capabilities.
    """

    def __init__(self, *, drop_all: bool = False) -> None:
        self._drop_all = drop_all
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
        threading.setprofile(self._begin_thread)

    def close(self) -> None:
        """Stop limiting the capabilities of new threads."""
        threading.setprofile(None)

    def reduce_this_thread(self) -> tuple[str, ...]:
        """Drop capabilities that the sampling thread does not need (all of them if ``drop_all``).

        If ``drop_all`` is set, returns the dropped capabilities that a feature needs
        (:data:`PURPOSES`). Raises ``OSError`` if the kernel refuses.
        """
        held = _name_capabilities(_read_effective())
        keep_only(() if self._drop_all else SAMPLING)
        return tuple(name for name in PURPOSES if name in held) if self._drop_all else ()

    def _begin_thread(self, *_: Any) -> None:
        sys.setprofile(None)  # needed only for the first event, which is the call to run()
        name = threading.current_thread().name
        job = next((kept for prefix, kept in JOBS.items() if name.startswith(prefix)), ())
        keep_only(() if self._drop_all else job)
        # Set the name that /proc and debuggers show; Python 3.14 does so itself.
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode("utf-8", "replace")[:15], 0, 0, 0)


def run_unprivileged(function: Callable[[], _T]) -> _T:
    """Call a function in a thread without capabilities.

    Threads that the function starts, directly or through C libraries, also have no capabilities.
    """
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - only for the agent

    def run() -> _T:
        keep_only(())
        return function()

    with ThreadPoolExecutor(1, thread_name_prefix="kprofiler-unprivileged") as threads:
        return threads.submit(run).result()


def check_imports_without_capabilities() -> None:
    """Check that threads without capabilities can import from the loaded modules' directories.

    Without CAP_DAC_READ_SEARCH or CAP_DAC_OVERRIDE (capabilities(7)), root cannot enter a user's
    home directory. Raises ``HostError``.
    """
    modules = {name: module for name, module in sys.modules.items() if "." not in name}
    files = [
        file for file in (getattr(module, "__file__", None) for module in modules.values()) if file
    ]
    closed = run_unprivileged(lambda: next(filter(None, map(_find_closed, files)), None))
    if closed:
        raise HostError(
            f"{closed} is not readable by unprivileged threads, which import modules from it",
            hint=f"chmod o+rx {closed}, or install otel-kprofiler elsewhere, such as in /opt",
        )


def _find_closed(file: str) -> str | None:
    """Returns the topmost inaccessible directory, or the file if only the file is unreadable."""
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError:
        *above, directory = Path(file).parents[::-1]
        for path in (*above, directory):
            if not os.access(path, os.X_OK if path != directory else os.X_OK | os.R_OK):
                return str(path)
        return file
    except OSError:  # an archive, or a missing file
        pass
    return None


def give_up_capabilities(*kept: str) -> None:
    """Drop all capabilities except ``kept`` in a single-threaded process. Raises ``OSError``."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    keep_only(kept)


def keep_only(names: Iterable[str]) -> None:
    """Drop all capabilities of this thread except those named. Raises ``OSError``."""
    mask = sum(1 << CAPABILITIES[name] for name in names) & _read_effective()
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = ctypes.create_string_buffer(_SETS.pack(low, low, 0, high, high, 0))
    call_libc("capset", "capset", _make_header(), data)
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def _read_effective() -> int:
    """Returns this thread's effective capabilities; unlike /proc, needs no free file descriptor."""
    data = ctypes.create_string_buffer(_SETS.size)
    call_libc("capget", "capget", _make_header(), data)
    low, _, _, high, _, _ = _SETS.unpack(data)
    effective: int = low | high << 32
    return effective


def _make_header() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(struct.pack("=Ii", _VERSION_3, 0))


def held_capabilities(status: bytes) -> frozenset[str]:
    """Returns the effective capabilities in ``/proc/PID/status``; unknown ones like ``CAP_50``."""
    return _name_capabilities(parse_capabilities(status).effective)


def _name_capabilities(effective: int) -> frozenset[str]:
    names = {number: name for name, number in CAPABILITIES.items()}
    return frozenset(
        names.get(number, f"CAP_{number}")
        for number in range(effective.bit_length())
        if effective >> number & 1
    )


def read_threads(files: HostFiles, pid: int | str = "self") -> dict[str, frozenset[str]]:
    """Read the effective capabilities of threads, keyed by ``TID name``. Raises ``OSError``."""
    threads = {}
    for tid in files.list_dir(f"/proc/{pid}/task"):
        try:
            status = files.read_bytes(f"/proc/{pid}/task/{tid}/status")
        except (FileNotFoundError, ProcessLookupError):
            continue
        name = status.partition(b"\n")[0].removeprefix(b"Name:\t").decode("utf-8", "replace")
        threads[f"{tid} {name}"] = held_capabilities(status)
    return threads
