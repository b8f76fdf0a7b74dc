"""Builds files' missing unwind tables, in processes with limited time and memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from otel_kprofiler.elf import ElfFile, frame_index
from otel_kprofiler.host import (
    ChildFailed,
    ChildLimits,
    ChildProblem,
    CpuRate,
    LimitedChildren,
    RefusedFiles,
    identify_content,
)
from otel_kprofiler.model import Segment
from otel_kprofiler.unwinding import go_frames
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused
from otel_kprofiler.unwinding.table import ENTRY_BYTES, MAX_ENTRIES, Tables, check_pairs

MAX_FRAMES_BYTES: Final = 64 << 20
MAX_GO_BYTES: Final = 256 << 20
TIMEOUT_S: Final = 30.0
"""Wall-clock limit on a busy machine, in addition to the CPU time limit."""
FRAMES_CPU: Final = CpuRate(least_s=1, per_mib_s=0.25, most_s=10)
"""For ``.eh_frame``: ten times what compilers' tables need."""
GO_CPU: Final = CpuRate(least_s=1, per_mib_s=0.25, most_s=20)
"""For ``.gopclntab``: six times what the linker's tables need."""
_REFUSALS: Final = {
    ChildProblem.UNANSWERED: Refusal.UNREADABLE,
    ChildProblem.NO_PROCESS: Refusal.FAILED,
    ChildProblem.CPU_TIME: Refusal.SLOW,
}
_MAY_PASS: Final = (Refusal.UNREADABLE, Refusal.FAILED)


class Children(LimitedChildren):
    """Runs processes that build tables, until :meth:`stop`. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._refused: RefusedFiles[tuple[Refusal, str]] = RefusedFiles()

    def run_script(
        self, script: str, fd: int, arguments: Iterable[object], limits: ChildLimits
    ) -> bytes:
        """Run a Python script that does not import this package. Returns its output.

        Args:
            script: path of the script.
            fd: the file, passed as standard input.
            arguments: command-line arguments that the script gets.
            limits: resource limits of the process.

        Raises:
            TableRefused: the script failed, took too long, or was stopped.
        """
        command = [sys.executable, "-I", "-S", script, *map(str, arguments)]
        try:
            return self.run(command, fd, limits)
        except ChildFailed as error:
            others = Refusal.FAILED if error.may_pass else Refusal.NOT_INDEXED
            refusal = _REFUSALS.get(error.problem, others)
            raise TableRefused(refusal, str(error)) from error

    @contextmanager
    def trying_once(self, fd: int, section: str) -> Iterator[None]:
        """Immediately reject input that was rejected in the last hour, unless the file has changed.

        Temporary failures are not remembered.

        Args:
            fd: descriptor of the file.
            section: name of the section to read.

        Raises:
            TableRefused: the section was refused before.
        """
        key = section, identify_content(fd)
        if (reason := self._refused.find(key)) is not None:
            raise TableRefused(*reason)
        try:
            yield
        except TableRefused as error:
            if error.refusal not in _MAY_PASS:
                self._refused.add(key, (error.refusal, error.detail))
            raise


def index_frames(
    fd: int, frames: Segment, timeout_s: float = TIMEOUT_S, *, children: Children
) -> Tables:
    """Make the search table of ``.eh_frame``; blocks until the process has exited.

    Args:
        fd: the file, open for reading.
        frames: location of the section.
        timeout_s: time after which the process is killed, in seconds.
        children: runs the child process.

    Raises:
        TableRefused: the section is damaged or too large, or the process exceeded a limit.
    """
    if frames.size > MAX_FRAMES_BYTES:
        raise TableRefused(Refusal.TOO_LARGE, f".eh_frame of {frames.size} bytes")
    with children.trying_once(fd, ".eh_frame"):
        arguments = (frames.offset, frames.size, frames.address)
        # the output is at most half as large as the section
        limits = ChildLimits(frame_index.MEMORY_BYTES, FRAMES_CPU.grant(frames.size), timeout_s)
        pairs = children.run_script(frame_index.__file__, fd, arguments, limits)
        entries = len(pairs) // ENTRY_BYTES
        if not entries:
            raise TableRefused(Refusal.NO_FRAMES, ".eh_frame has no entries")
        _check(pairs)
        return Tables(frames.address, None, entries, frames, pairs)


def index_go(
    fd: int,
    elf: ElfFile,
    table: Segment,
    text: Segment,
    others: Tables | None,
    *,
    children: Children,
) -> Tables:
    """Make tables from ``.gopclntab``; blocks until the process has exited.

    Args:
        fd: the file, open for reading.
        elf: the file's parsed headers.
        table: the file's ``.gopclntab``.
        text: the file's ``.text``.
        others: the file's existing tables, for C code.
        children: runs the child process.

    Raises:
        TableRefused: the table is damaged, too large or unknown, or the process exceeded a limit.
    """
    if table.size > MAX_GO_BYTES:
        raise TableRefused(Refusal.TOO_LARGE, f".gopclntab of {table.size} bytes")
    empty = Segment(table.offset, 0, table.address)
    tables = others or Tables(table.address, table.offset, 0, empty)
    pairs = Segment(tables.search_offset or 0, tables.search_bytes, 0)
    arguments = [str(tables.frames.address + tables.made_at), str(tables.origin)]
    arguments += [":".join(map(str, part)) for part in (pairs, table, text, *elf.loads)]
    with children.trying_once(fd, ".gopclntab"):
        limits = ChildLimits(go_frames.MEMORY_BYTES, GO_CPU.grant(table.size), TIMEOUT_S)
        made = children.run_script(go_frames.__file__, fd, arguments, limits)
        (entries,) = go_frames.COUNT.unpack_from(made)
        end = go_frames.COUNT.size + entries * ENTRY_BYTES
        _check(made[go_frames.COUNT.size : end])
    return tables._replace(
        search_offset=None,
        entries=entries,
        made=made[go_frames.COUNT.size : end],
        made_frames=made[end:],
    )


def _check(pairs: bytes) -> None:
    if len(pairs) > MAX_ENTRIES * ENTRY_BYTES:
        raise TableRefused(Refusal.TOO_LARGE, f"{len(pairs) // ENTRY_BYTES} functions")
    check_pairs(iter([pairs]))
