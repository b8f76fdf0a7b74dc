"""Registers the processes of this host that run CPython, as they come and go."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple, Protocol

from otel_kprofiler.bpf import PythonLayout, PythonProcess
from otel_kprofiler.errors import HostError, describe_error
from otel_kprofiler.host import Access, ReferableFiles
from otel_kprofiler.interpreters.binary import Interpreter
from otel_kprofiler.interpreters.files import InterpreterFiles
from otel_kprofiler.interpreters.refusal import Refusal
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
_JOIN_S: Final = 5.0

_log = logging.getLogger(__name__)


class PythonRegistry(Protocol):
    """What the kernel program knows of processes, such as ``PythonMaps``; thread-safe."""

    def register(self, tgid: int, layout: PythonLayout, process: PythonProcess) -> bool:
        """Read the frames of a process from now on; False if there is no room for it."""

    def release(self, tgid: int) -> bool:
        """Read them no longer; whether it was registered."""


class _Registered(NamedTuple):
    """A process as it was registered; ``start`` is where the interpreter's code is mapped."""

    layout: PythonLayout
    process: PythonProcess
    start: int


class PythonCounts(NamedTuple):
    """What became of interpreters, at one instant.

    Attributes:
        processes: registered now.
        without_room: processes that were not registered because too many are.
        refused: files with interpreters whose frames are not read, by reason.
    """

    processes: int
    without_room: int
    refused: Mapping[Refusal, int]

    def as_dict(self) -> dict[str, object]:
        """As plain values, for JSON."""
        refused = {reason.name.lower(): count for reason, count in self.refused.items()}
        return {**self._asdict(), "refused": refused}


class PythonProcesses:
    """Registers processes by what events tell of them. Belongs to one thread, but for ``counts``.

    Args:
        registry: where they are registered.
        files: this host's.
        on_found: gets each interpreter, before a process is registered with it.
    """

    def __init__(
        self,
        registry: PythonRegistry,
        files: ReferableFiles,
        on_found: Callable[[Interpreter], None] | None = None,
    ) -> None:
        self._registry = registry
        self._files = InterpreterFiles(files, on_found)
        self._registered: dict[int, _Registered] = {}
        self._without_room = 0

    def apply(self, event: ProcessEvent) -> None:
        """Take an event of a stream that tells of all processes, in its order.

        Raises:
            OSError: the kernel refused.
        """
        match event:
            case Started(parent=int(parent)) if parent in self._registered:
                self._register(event.process.tgid, self._registered[parent])
            case Mapped() if event.process.tgid not in self._registered:
                self._inspect(event)
            case Exec() | Exited():
                self._release(event.process.tgid)
            case Unmapped():
                known = self._registered.get(event.process.tgid)
                if known is not None and known.start == event.mapping.start:
                    self._release(event.process.tgid)

    def counts(self) -> PythonCounts:
        """What became of interpreters; thread-safe."""
        refused = dict(self._files.refused)
        return PythonCounts(len(self._registered), self._without_room, refused)

    def _inspect(self, event: Mapped) -> None:
        mapping = event.mapping
        if not mapping.path.startswith("/"):
            return  # memory, or the vDSO
        pid = event.process.tgid
        found = self._files.find(pid, mapping, event.build_id)
        if found is None:
            return
        load_bias = found.find_load_bias(mapping.start, mapping.file_offset)
        if load_bias is not None:
            process = found.in_process(load_bias)
            self._register(pid, _Registered(found.layout, process, mapping.start))

    def _register(self, pid: int, registered: _Registered) -> None:
        if self._registry.register(pid, registered.layout, registered.process):
            self._registered[pid] = registered
        else:
            self._without_room += 1

    def _release(self, pid: int) -> None:
        if self._registered.pop(pid, None) is not None:
            self._registry.release(pid)


class PythonTracking:
    """Registers processes in a thread, from :meth:`start` to :meth:`close`.

    Args:
        registry: where they are registered.
        pids: only these; empty for all.
        children: also the children of ``pids``, and theirs.
        files: this host's.
        on_found: gets each interpreter in that thread, before a process is registered with it.
    """

    def __init__(
        self,
        registry: PythonRegistry,
        pids: Collection[int] = (),
        *,
        children: bool = False,
        files: Access | None = None,
        on_found: Callable[[Interpreter], None] | None = None,
    ) -> None:
        self._files = files or Access()
        self._pids = pids
        self._children = children
        self._processes = PythonProcesses(registry, self._files, on_found)
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kprofiler-python", daemon=True)

    def start(self) -> None:
        """Find the processes that there are, and follow what becomes of them."""
        self._thread.start()

    def counts(self) -> PythonCounts:
        """What became of interpreters; thread-safe."""
        return self._processes.counts()

    def close(self) -> None:
        """Stop the thread; to be called once. Processes stay registered."""
        os.eventfd_write(self._stop_fd, 1)
        if self._pid == os.getpid() and self._thread.ident is not None:
            self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            os.close(self._stop_fd)

    def _run(self) -> None:
        try:
            with ProcessEvents(self._pids, children=self._children, files=self._files) as events:
                self._follow(events)
        except (HostError, OSError) as error:
            _log.warning("new processes will have no Python frames: %s", describe_error(error))

    def _follow(self, events: ProcessEvents) -> None:
        waited_for = [events.fileno(), self._stop_fd]
        while self._stop_fd not in select.select(waited_for, [], [], INTERVAL_S)[0]:
            for event in events.poll():
                self._processes.apply(event)
