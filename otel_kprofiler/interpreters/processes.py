"""Registers CPython processes, so that the BPF program reads their frames until they exit."""

import contextlib
import functools
import logging
import mmap
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

from otel_kprofiler.bpf import ProcessSeen, Program, PythonLayout, PythonMaps, PythonProcess
from otel_kprofiler.errors import HostError, describe_error
from otel_kprofiler.host import (
    Access,
    MemoryMapping,
    PatientCalls,
    ReferableFiles,
    parse_mappings,
    read_capabilities,
    read_maps,
)
from otel_kprofiler.interpreters.binary import Interpreter
from otel_kprofiler.interpreters.files import InterpreterFiles
from otel_kprofiler.interpreters.refusal import Refusal
from otel_kprofiler.model import BuildId
from otel_kprofiler.stopping import join_and_release
from otel_kprofiler.tracking import (
    Exec,
    Exited,
    Mapped,
    ProcessEvent,
    ProcessEvents,
    Started,
    Unmapped,
)

INTERVAL_S: Final = 0.25
_TIDY_S: Final = 5.0
_REST_S: Final = 60.0
"""Interval between checks for exited processes while no new process is sampled, in seconds."""
_FIRST_RETRY_S, _TRIES = 1.0, 6
"""For a process with an unreadable file: the delay in seconds before the first retry, which doubles
with each further retry, and the number of retries."""
_MAX_RETRIES: Final = 1024
"""Maximum number of processes that are waiting to be examined again."""

_log = logging.getLogger(__name__)


class _Registered(NamedTuple):
    """A registered process; ``start`` is the address of the interpreter's code."""

    layout: PythonLayout
    process: PythonProcess
    start: int


class PythonCounts(NamedTuple):
    """A snapshot of how many processes are registered and how many were refused.

    ``without_room`` counts processes that did not fit into the table. ``refused`` counts
    interpreter files by the reason for the refusal, and ``refused_processes`` counts the processes
    that ran these files.
    """

    processes: int
    without_room: int
    refused: Mapping[Refusal, int]
    refused_processes: Mapping[Refusal, int]

    def as_dict(self) -> dict[str, object]:
        """Returns the counts as JSON-serializable values."""
        return {
            **self._asdict(),
            "refused": _by_name(self.refused),
            "refused_processes": _by_name(self.refused_processes),
        }


class PythonProcesses:
    """Registers processes. Not thread-safe, except for :meth:`counts` and :meth:`stop`.

    ``on_found`` is called with each interpreter, before processes that run it are registered.
    """

    def __init__(
        self,
        registry: PythonMaps,
        files: ReferableFiles,
        on_found: Callable[[Interpreter], None] | None = None,
    ) -> None:
        self._registry = registry
        self._host = files
        self._calls = PatientCalls("kprofiler-python")
        self._files = InterpreterFiles(files, on_found, self._calls)
        self._registered: dict[int, _Registered] = {}
        self._without_room = 0
        self._refused: set[int] = set()  # tgids of running processes
        self._refused_count: Counter[Refusal] = Counter()

    def inspect(self, seen: ProcessSeen) -> bool:
        """Register a sampled process if it runs CPython, and release it otherwise.

        Returns False if the result is not final because a file could not be read.

        Raises ``PermissionError`` if the process's mappings cannot be read, and other ``OSError``
        if the kernel rejects the registration.
        """
        unread = self._files.unread
        mappings = self._read_code(seen.tgid)
        for mapping in mappings:
            interpreter = self._look(seen.tgid, mapping, None)
            if interpreter is not None:
                self._register(seen.tgid, interpreter, seen.image)
                return True
        self._release(seen.tgid)
        if self._files.unread > unread:
            return False
        if _is_of(mappings, seen.program):
            self._registry.pass_over(seen.program)
        return True

    def release_ended(self) -> None:
        """Release the processes that have exited. Raises ``OSError`` if ``/proc`` is unreadable."""
        alive = set(self._host.list_dir("/proc"))
        for pid in [pid for pid in self._registered if str(pid) not in alive]:
            self._release(pid)
        self._refused = {pid for pid in self._refused if str(pid) in alive}

    def apply(self, event: ProcessEvent) -> None:
        """Handle the next event. Raises ``OSError`` if the kernel rejects a registration."""
        match event:
            case Started(parent=int(parent)) if parent in self._registered:
                self._register(event.process.tgid, self._registered[parent])
            case Mapped() if event.process.tgid not in self._registered:
                interpreter = self._look(event.process.tgid, event.mapping, event.build_id)
                if interpreter is not None:
                    self._register(event.process.tgid, interpreter)
            case Exec() | Exited():
                self._release(event.process.tgid)
            case Unmapped():
                registered = self._registered.get(event.process.tgid)
                if registered is not None and registered.start == event.mapping.start:
                    self._release(event.process.tgid)

    def stop(self) -> list[threading.Thread]:
        """Stop reading files, and return the reader threads to join. Thread-safe."""
        return self._calls.stop()

    def counts(self) -> PythonCounts:
        """Returns the counts; thread-safe."""
        return PythonCounts(
            len(self._registered),
            self._without_room,
            dict(self._files.refused),
            dict(self._refused_count),
        )

    def _read_code(self, pid: int) -> list[MemoryMapping]:
        try:
            maps = read_maps(self._host, pid)
        except (FileNotFoundError, ProcessLookupError):
            return []
        return list(parse_mappings(maps, only_code=True))

    def _look(
        self, pid: int, mapping: MemoryMapping, build_id: BuildId | None
    ) -> _Registered | None:
        if not mapping.path.startswith("/"):
            return None  # anonymous memory, or the vDSO
        interpreter = self._files.find(pid, mapping, build_id)
        if isinstance(interpreter, Refusal):
            if pid not in self._refused:
                self._refused.add(pid)
                self._refused_count[interpreter] += 1
            return None
        if interpreter is None:
            return None
        load_bias = interpreter.find_load_bias(mapping.start, mapping.file_offset)
        if load_bias is None:
            return None
        return _Registered(interpreter.layout, interpreter.in_process(load_bias), mapping.start)

    def _register(self, pid: int, registered: _Registered, image: int = 0) -> None:
        if self._registry.register(pid, registered.layout, registered.process, image):
            self._registered[pid] = registered
        else:
            self._without_room += 1

    def _release(self, pid: int) -> None:
        if self._registered.pop(pid, None) is not None:
            self._registry.release(pid)


def _by_name(counts: Mapping[Refusal, int]) -> dict[str, int]:
    return {reason.name.lower(): count for reason, count in counts.items()}


def _is_of(mappings: Iterable[MemoryMapping], program: Program) -> bool:
    """Returns whether mappings belong to a program; may miss matches on overlayfs or btrfs."""
    # [vsyscall] may be executable but not readable.
    code = [mapping for mapping in mappings if mapping.permissions.startswith("r-x")]
    pages = sum(mapping.end - mapping.start for mapping in code) // mmap.PAGESIZE
    return pages == program.code_pages and any(
        (mapping.device, mapping.inode) == (program.device, program.inode)
        for mapping in code
        if mapping.inode
    )


class _Retry(NamedTuple):
    at_s: float
    tries: int
    seen: ProcessSeen


class PythonTracking:
    """Registers processes in a background thread, from :meth:`start` to :meth:`close`.

    The BPF program reports the processes that it samples, and their mappings are then read. If this
    process is not permitted to read the mappings, it reads the kernel's mapping records instead,
    which costs more, because the kernel generates them for all processes, sampled or not.

    Args:
        pids: the processes to track; empty for all.
        children: whether to also track the descendants of ``pids``.
        on_found: called in the registering thread with each interpreter, before a process is
            registered with it.
    """

    def __init__(
        self,
        registry: PythonMaps,
        pids: Collection[int] = (),
        *,
        children: bool = False,
        files: Access | None = None,
        on_found: Callable[[Interpreter], None] | None = None,
    ) -> None:
        self._registry = registry
        self._files = files or Access()
        self._pids = pids
        self._children = children
        self._processes = PythonProcesses(registry, self._files, on_found)
        self._retries: dict[int, _Retry] = {}  # by tgid
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kprofiler-python", daemon=True)

    def start(self) -> None:
        """Start the thread that registers processes when they are first sampled."""
        self._thread.start()

    def counts(self) -> PythonCounts:
        """Returns the counts; thread-safe."""
        return self._processes.counts()

    def close(self) -> None:
        """Stop the thread. Call this method only once. Processes remain registered."""
        os.eventfd_write(self._stop_fd, 1)
        threads: list[threading.Thread] = []
        if self._pid == os.getpid() and self._thread.ident is not None:
            threads = [self._thread, *self._processes.stop()]
        join_and_release(threads, functools.partial(os.close, self._stop_fd))

    def _run(self) -> None:
        with contextlib.ExitStack() as undo:
            try:
                self._follow(undo)
            except (HostError, OSError) as error:
                _log.warning("new processes will have no Python frames: %s", describe_error(error))

    def _follow(self, undo: contextlib.ExitStack) -> None:
        waiting = select.poll()  # select(2) only supports descriptors below 1024
        waiting.register(self._stop_fd, select.POLLIN)
        waiting.register(self._registry.fileno(), select.POLLIN)
        events: ProcessEvents | None = None
        tidy_at = time.monotonic() + _REST_S
        while self._stop_fd not in dict(waiting.poll(self._find_wait_ms(events, tidy_at))):
            seen, now_s = self._registry.take_seen(), time.monotonic()
            if seen:
                tidy_at = min(tidy_at, now_s + _TIDY_S)
            due = [retry.seen for retry in self._retries.values() if retry.at_s <= now_s]
            permitted = self._inspect(seen + due)
            if not permitted and events is None and self._lacks_right():
                events = ProcessEvents(self._pids, children=self._children, files=self._files)
                undo.enter_context(events)
                waiting.register(events.fileno(), select.POLLIN)
            for event in events.poll() if events else ():
                self._processes.apply(event)
            if time.monotonic() >= tidy_at:
                self._processes.release_ended()
                tidy_at = time.monotonic() + _REST_S

    def _find_wait_ms(self, events: ProcessEvents | None, tidy_at: float) -> float:
        due_at = min([tidy_at, *(retry.at_s for retry in self._retries.values())])
        due_s = max(0.0, due_at - time.monotonic())
        return 1000 * (min(INTERVAL_S, due_s) if events else due_s)

    def _retry_later(self, seen: ProcessSeen, earlier: _Retry | None) -> None:
        """Schedule another inspection of a process, because each process is reported only once."""
        tries = earlier.tries if earlier and earlier.seen == seen else 0
        if tries < _TRIES and len(self._retries) < _MAX_RETRIES:
            at_s = time.monotonic() + _FIRST_RETRY_S * 2**tries
            self._retries[seen.tgid] = _Retry(at_s, tries + 1, seen)

    def _inspect(self, processes: Iterable[ProcessSeen]) -> bool:
        """Examine sampled processes. Returns False if the kernel denies access to any process."""
        permitted = True
        for seen in processes:
            earlier = self._retries.pop(seen.tgid, None)
            try:
                if not self._processes.inspect(seen):
                    self._retry_later(seen, earlier)
            except PermissionError:
                permitted = False
        return permitted

    def _lacks_right(self) -> bool:
        return bool(read_capabilities(self._files, "thread-self").missing(("CAP_SYS_PTRACE",)))
