"""Makes missing unwind tables of files, in processes with limits of time and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from otel_kprofiler.elf import ElfFile, frame_index
from otel_kprofiler.errors import describe_status
from otel_kprofiler.host import (
    CpuGrant,
    CpuRate,
    DeviceHangs,
    MeteredChild,
    PatientChildren,
    RefusedFiles,
    grant_memory,
    has_exceeded_cpu,
    identify_content,
    limit_cpu,
    limit_memory,
)
from otel_kprofiler.model import Segment
from otel_kprofiler.unwinding import go_frames
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused
from otel_kprofiler.unwinding.table import ENTRY_BYTES, MAX_ENTRIES, Tables, check_pairs

MAX_FRAMES_BYTES: Final = 64 << 20
MAX_GO_BYTES: Final = 256 << 20
TIMEOUT_S: Final = 30.0
"""Limit of wall-clock time on a busy machine, besides the limit of CPU time."""
FRAMES_CPU: Final = CpuRate(least_s=1, per_mib_s=0.25, most_s=10)
"""For ``.eh_frame``: ten times what those of compilers take."""
GO_CPU: Final = CpuRate(least_s=1, per_mib_s=0.25, most_s=20)
"""For ``.gopclntab``: six times what those of the linker take."""
_SHOWN: Final = 200


class Children:
    """Runs processes that make tables, until :meth:`stop`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[MeteredChild] = set()
        self._stopped = False
        self._patient = PatientChildren()
        self._refused: RefusedFiles[tuple[Refusal, str]] = RefusedFiles()

    def run(
        self,
        script: str,
        fd: int,
        arguments: Iterable[str],
        *,
        timeout_s: float,
        memory_bytes: int,
        cpu: CpuGrant,
    ) -> bytes:
        """Run a Python script with the file as its input. Returns its output.

        Args:
            script: its path.
            fd: the file.
            arguments: arguments of the script.
            timeout_s: time after which it is killed, in seconds.
            memory_bytes: its limit of memory; reduced to half of the memory that the cgroup leaves.
            cpu: its limit of CPU time.

        Raises:
            TableRefused: it failed, took too long, or was stopped.
            OSError: no process could be started.
        """
        device = os.fstat(fd).st_dev
        with _refusing_hangs():
            self._patient.check(device)
        with self._lock:
            if self._stopped:
                raise TableRefused(Refusal.NOT_INDEXED, "the profiler stops")
            grant = grant_memory(memory_bytes)
            child = MeteredChild(
                [sys.executable, "-I", "-S", script, *arguments],
                stdin=fd,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
            )
            self._running.add(child)
        try:
            limit_cpu(child.pid, cpu)
            with limit_memory(child.pid, grant), _refusing_hangs():
                output, _ = self._patient.wait(child, device, timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TableRefused(Refusal.NOT_INDEXED, f"took over {timeout_s:g} s") from error
        finally:
            with self._lock:
                self._running.discard(child)
        if has_exceeded_cpu(child.returncode):
            raise TableRefused(Refusal.SLOW, cpu.describe())
        if child.returncode:
            cause = output[:_SHOWN].decode("utf-8", "replace")
            raise TableRefused(Refusal.NOT_INDEXED, cause or describe_status(child.returncode))
        return output

    @contextmanager
    def trying_once(self, fd: int, section: str) -> Iterator[None]:
        """Refuse at once what was refused in the last hour, unless the file has changed.

        Args:
            fd: the file.
            section: name of the section that is read.

        Raises:
            TableRefused: it was refused before.
        """
        key = section, identify_content(fd)
        if (reason := self._refused.find(key)) is not None:
            raise TableRefused(*reason)
        try:
            yield
        except TableRefused as error:
            if error.refusal is not Refusal.UNREADABLE:
                self._refused.add(key, (error.refusal, error.detail))
            raise

    def stop(self) -> None:
        """Kill running processes, and start no more."""
        with self._lock:
            self._stopped = True
            for child in self._running:
                child.kill()


@contextmanager
def _refusing_hangs() -> Iterator[None]:
    try:
        yield
    except DeviceHangs as error:
        raise TableRefused(Refusal.UNREADABLE, str(error)) from error


def index_frames(
    fd: int, frames: Segment, timeout_s: float = TIMEOUT_S, *, children: Children
) -> Tables:
    """Make the search table of ``.eh_frame``; blocks until the process has exited.

    Args:
        fd: the file, open for reading.
        frames: place of the section.
        timeout_s: time after which the process is killed, in seconds.
        children: runs the process.

    Raises:
        TableRefused: the section is damaged or too large, or the process exceeded a limit.
        OSError: no process could be started.
    """
    if frames.size > MAX_FRAMES_BYTES:
        raise TableRefused(Refusal.TOO_LARGE, f".eh_frame of {frames.size} bytes")
    with children.trying_once(fd, ".eh_frame"):
        arguments = (frames.offset, frames.size, frames.address)
        # its output is at most half as long as the section
        pairs = children.run(
            frame_index.__file__,
            fd,
            map(str, arguments),
            timeout_s=timeout_s,
            memory_bytes=frame_index.MEMORY_BYTES,
            cpu=FRAMES_CPU.grant(frames.size),
        )
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
        elf: its headers.
        table: its ``.gopclntab``.
        text: its ``.text``.
        others: existing tables of the file, of C code.
        children: runs the process.

    Raises:
        TableRefused: the table is damaged, too large or unknown, or the process exceeded a limit.
        OSError: no process could be started.
    """
    if table.size > MAX_GO_BYTES:
        raise TableRefused(Refusal.TOO_LARGE, f".gopclntab of {table.size} bytes")
    empty = Segment(table.offset, 0, table.address)
    tables = others or Tables(table.address, table.offset, 0, empty)
    pairs = Segment(tables.search_offset or 0, tables.search_bytes, 0)
    arguments = [str(tables.frames.address + tables.made_at), str(tables.origin)]
    arguments += [":".join(map(str, part)) for part in (pairs, table, text, *elf.loads)]
    with children.trying_once(fd, ".gopclntab"):
        made = children.run(
            go_frames.__file__,
            fd,
            arguments,
            timeout_s=TIMEOUT_S,
            memory_bytes=go_frames.MEMORY_BYTES,
            cpu=GO_CPU.grant(table.size),
        )
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
