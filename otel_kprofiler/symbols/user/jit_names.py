"""Names runtime-generated code from perf maps and jitdumps, which are read in the background."""

from collections import deque
from collections.abc import Callable
from typing import Final

from otel_kprofiler.forks import ProcessLock
from otel_kprofiler.model import ProcessKey
from otel_kprofiler.symbols.cache import BoundedCache
from otel_kprofiler.symbols.user.file import NO_FILE, PENDING, NamedAddress
from otel_kprofiler.symbols.user.jit_code import LOOK_AGAIN_NS, ProcessCode, make_named

MAX_PROCESSES: Final = 512
"""Maximum number of cached processes, including processes whose code has no description."""
MAX_BYTES: Final = 16 << 20
"""Memory limit for the code of all processes; the least recently used process is evicted."""
_MAX_NAMES: Final = 4096


class _Process:
    __slots__ = ("code", "is_waiting", "key", "looked_ns", "nbytes")

    def __init__(self, key: ProcessKey, code: ProcessCode) -> None:
        self.key = key
        self.code = code
        self.looked_ns = -1  # boottime of the last attempt that found no description
        self.is_waiting = False
        self.nbytes = 0


class JitNames:
    """Names JIT code for the thread that drains samples, and reads files in another thread.

    Thread-safe. ``open_code`` must not read files.
    """

    def __init__(
        self,
        open_code: Callable[[ProcessKey], ProcessCode],
        boot_ns: Callable[[], int],
    ) -> None:
        self._open_code = open_code
        self._boot_ns = boot_ns
        self._lock = ProcessLock()
        self._processes: dict[ProcessKey, _Process] = {}  # least recently used first
        self._waiting: deque[_Process] = deque()
        self._named = BoundedCache(_MAX_NAMES, make_named)
        self._bytes = 0

    @property
    def has_work(self) -> bool:
        """Returns whether a process is waiting for :meth:`read_one`."""
        return bool(self._waiting)

    def name(self, key: ProcessKey, address: int, at_ns: int) -> tuple[NamedAddress, bool]:
        """Looks up the function at an address in a process at boottime ``at_ns``; never blocks.

        Also returns whether this call queued the process for :meth:`read_one`.
        """
        process = self._processes.get(key)
        if process is None:
            return PENDING, self._ask(self._add(key))
        if process.looked_ns >= 0:
            is_due = self._boot_ns() - process.looked_ns >= LOOK_AGAIN_NS
            return NO_FILE, is_due and self._ask(process)
        if at_ns > process.code.read_ns:
            return PENDING, self._ask(process)
        function = process.code.lookup(address, at_ns)
        return (self._named[function] if function else NO_FILE), False

    def read_one(self) -> None:
        """Read new data for the next queued process, if any. May block on a file system."""
        with self._lock:
            if not self._waiting:
                return
            process = self._waiting.popleft()
        now_ns = self._boot_ns()
        has_more = False
        try:
            has_more = process.code.update(now_ns)
            process.looked_ns = -1
        except OSError:
            process.looked_ns = now_ns
        with self._lock:
            process.is_waiting = has_more
            if has_more:
                self._waiting.append(process)
            nbytes = process.code.nbytes
            if self._processes.get(process.key) is process:
                self._bytes += nbytes - process.nbytes
                process.nbytes = nbytes
                self._make_space(process)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._waiting.clear()
            for process in self._processes.values():
                process.code.close()
            self._processes.clear()
            self._bytes = 0

    def _add(self, key: ProcessKey) -> _Process:
        with self._lock:
            process = self._processes[key] = _Process(key, self._open_code(key))
            if len(self._processes) > MAX_PROCESSES:
                self._forget(next(iter(self._processes.values())))
            return process

    def _ask(self, process: _Process) -> bool:
        with self._lock:
            if process.is_waiting:
                return False
            process.is_waiting = True
            self._waiting.append(process)
            self._processes[process.key] = self._processes.pop(process.key, process)
            return True

    def _make_space(self, new: _Process) -> None:
        for process in list(self._processes.values()):
            if self._bytes <= MAX_BYTES:
                return
            if process is not new:
                self._forget(process)

    def _forget(self, process: _Process) -> None:
        del self._processes[process.key]
        self._bytes -= process.nbytes
        if not process.is_waiting:  # otherwise, the reading thread is still using the code
            process.code.close()
