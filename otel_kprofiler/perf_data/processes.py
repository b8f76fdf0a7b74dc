"""Tracks the processes in a recording: their names, programs and mappings over time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import Resource, Stack
from otel_kprofiler.perf_data.records import Comm, FileMapping, Fork

_MAX_COPIED: Final = 10_000_000
"""Maximum number of mappings copied for forked processes. Each mapping uses 16 bytes."""


class AddressSpace:
    """The executable mappings of a process, or of the kernel. Mappings never overlap.

    Forked processes share the lists of mappings until one of the processes maps a file.
    """

    def __init__(self) -> None:
        self._mappings: list[FileMapping] = []
        self._starts: list[int] = []
        self._is_shared = False

    def add(self, mapping: FileMapping) -> int:
        """Adds a mapping, replacing any overlapping mappings.

        Returns how many mappings were copied because the list was shared.
        """
        copied = len(self._starts) if self._is_shared else 0
        if self._is_shared:
            self._mappings, self._starts = self._mappings[:], self._starts[:]
            self._is_shared = False
        first = bisect_right(self._starts, mapping.start)
        if first and self._mappings[first - 1].end > mapping.start:
            first -= 1
        last = first
        while last < len(self._starts) and self._starts[last] < mapping.end:
            last += 1
        parts = []
        for old in self._mappings[first:last]:
            if old.start < mapping.start:
                parts.append(old._replace(end=mapping.start))
            if old.end > mapping.end:
                offset = old.offset + mapping.end - old.start
                parts.append(old._replace(start=mapping.end, offset=offset))
        parts = sorted([*parts, mapping], key=lambda part: part.start)
        self._mappings[first:last] = parts
        self._starts[first:last] = [part.start for part in parts]
        return copied

    def find(self, address: int) -> FileMapping | None:
        """Returns the mapping at an address; None if there is none."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._mappings[at].end:
            return None
        return self._mappings[at]

    def copy(self) -> AddressSpace:
        """Returns a copy for a forked process."""
        other = AddressSpace()
        other._mappings, other._starts = self._mappings, self._starts
        self._is_shared = other._is_shared = True
        return other


@dataclass(eq=False, slots=True)
class Process:
    """A process, from one execve(2) to the next.

    Attributes:
        left: the mappings before execve(2), kept until the new program runs, because samples taken
            during execve(2) still contain the registers of the calling program.
        program: the path of the program; empty if unknown, as for kernel threads.
        resource: the process's Resource; None until its first sample.
        stacks: the resolved stacks, by mode and callchain; cleared when a mapping is added.
    """

    pid: int
    space: AddressSpace = field(default_factory=AddressSpace)
    left: AddressSpace | None = None
    program: bytes = b""
    resource: Resource | None = None
    stacks: dict[tuple[int, bytes], Stack] = field(default_factory=dict)

    def find(self, address: int) -> FileMapping | None:
        """Returns the mapping at an address; None if there is none."""
        mapping = self.space.find(address)
        return mapping or (self.left.find(address) if self.left else None)

    def run(self) -> None:
        """Records that the new program has begun to run."""
        if self.left is not None:
            self.left = None
            self.stacks.clear()

    def add(self, mapping: FileMapping) -> int:
        """Adds a mapping, and returns the result of :meth:`AddressSpace.add`.

        Treats the first mapped file as the program.
        """
        copied = self.space.add(mapping)
        self.stacks.clear()
        if not self.program and mapping.path.startswith(b"/") and self.resource is None:
            self.program = mapping.path
        return copied


class Processes:
    """The processes in a recording, as of the latest record added."""

    def __init__(self) -> None:
        self._processes: dict[int, Process] = {}
        self._names: dict[int, bytes] = {}
        self._copied = 0

    def map(self, mapping: FileMapping) -> None:
        """Records a mapping. Raises ``PayloadError`` if forks have copied too many mappings."""
        self._copied += self.process(mapping.pid).add(mapping)
        if self._copied > _MAX_COPIED:
            raise PayloadError(
                f"forked processes inherit more than the maximum of {_MAX_COPIED:,} mappings"
            )

    def process(self, pid: int) -> Process:
        """Returns the process that has the given id at this point in the recording."""
        process = self._processes.get(pid)
        if process is None:
            process = self._processes[pid] = Process(pid)
        return process

    def name(self, pid: int, tid: int) -> bytes:
        """Returns a thread's name, or else its process's name; empty if both are unknown."""
        return self._names.get(tid) or self._names.get(pid, b"")

    def rename(self, comm: Comm) -> None:
        """Records a thread's name, and the new program if the process executed one."""
        self._names[comm.tid] = comm.name
        if comm.is_exec:
            self._processes[comm.pid] = Process(comm.pid, left=self.process(comm.pid).space)

    def fork(self, fork: Fork) -> None:
        """Records a new thread or process."""
        if fork.pid != fork.parent:
            parent = self.process(fork.parent)
            space, program = parent.space.copy(), parent.program
            self._processes[fork.pid] = Process(fork.pid, space, program=program)
        name = self.name(fork.parent, fork.parent_tid)
        if name:
            self._names[fork.tid] = name
