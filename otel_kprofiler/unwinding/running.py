"""Lists files with executable mappings, to load their tables before the first sample.

A BPF iterator (mapped_files.bpf.h) lists the files, and identifies them by the same keys as
requests.
"""

import mmap
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from otel_kprofiler.bpf import iterate
from otel_kprofiler.host import FileRequest, HostFiles, read_stat
from otel_kprofiler.model import FileKey
from otel_kprofiler.unwinding.request import parse_rows

_MOST_LINKS: Final = 16
"""Maximum number of processes to list one by one. If more processes are requested, all processes
are listed."""
_READ_BYTES: Final = 256 * 1024


@contextmanager
def map_files(paths: Iterable[str]) -> Iterator[Collection[int]]:
    """Map files as executable, so that they are listed like running programs, and yield the inodes.

    Files that cannot be mapped, such as those on a file system mounted with noexec, are omitted.
    """
    with ExitStack() as mappings:
        inodes = set()
        for path in dict.fromkeys(paths):
            # ValueError: the file is empty
            with suppress(OSError, ValueError), open(path, "rb") as file:
                protection = mmap.PROT_READ | mmap.PROT_EXEC
                mappings.enter_context(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, protection))
                inodes.add(os.fstat(file.fileno()).st_ino)
        yield inodes


def list_running(
    program_fd: int,
    files: HostFiles,
    pids: Collection[int],
    *,
    mapped: Collection[int] = (),
    is_inner: bool,
    until_s: float,
) -> list[FileRequest]:
    """Returns a request for each file that a process has mapped as executable.

    Sorts files by the CPU time of their processes, then by the number of processes. ``pids``
    selects processes by their ids in ``/proc``; if empty, all processes are listed. ``mapped``
    contains the inode numbers of additional files to list, which this process has mapped
    (:func:`map_files`). ``is_inner`` states whether this process is in a pid namespace other than
    the initial one. Listing ends at the monotonic time ``until_s``, even if incomplete. Raises
    ``OSError`` if the kernel rejects the iterator.
    """
    users: dict[FileKey, set[int]] = {}
    requests: dict[FileKey, FileRequest] = {}
    this = os.getpid()
    listed_pids = {*pids, this} if mapped and pids else pids
    for row in _read_rows(program_fd, listed_pids, until_s):
        pid = row.tid if is_inner else row.tgid
        if not pids or pid in pids or (pid == this and row.key.inode in mapped):
            if row.key not in requests:
                requests[row.key] = row._replace(tgid=pid, tid=pid)
            users.setdefault(row.key, set()).add(pid)
    ticks = dict(_read_cpu_ticks(files, set().union(*users.values()), until_s))

    def use(key: FileKey) -> tuple[int, int]:
        return sum(ticks.get(pid, 0) for pid in users[key]), len(users[key])

    return [requests[key] for key in sorted(requests, key=use, reverse=True)]


def _read_rows(program_fd: int, pids: Collection[int], until_s: float) -> Iterator[FileRequest]:
    if 0 < len(pids) <= _MOST_LINKS:
        try:
            for pid in pids:
                with suppress(ProcessLookupError):
                    yield from _iterate(program_fd, pid, until_s)
        except OSError:
            pass  # before 6.1, iterators cannot be restricted to a process
        else:
            return
    yield from _iterate(program_fd, 0, until_s)


def _iterate(program_fd: int, pid: int, until_s: float) -> Iterator[FileRequest]:
    reader = iterate(program_fd, pid)
    try:
        while time.monotonic() < until_s:
            try:
                rows = os.read(reader, _READ_BYTES)
            except BlockingIOError:  # the kernel skipped a million mappings without code
                continue
            if not rows:
                return
            yield from parse_rows(rows)
    finally:
        os.close(reader)


def _read_cpu_ticks(
    files: HostFiles, pids: Iterable[int], until_s: float
) -> Iterator[tuple[int, int]]:
    for pid in pids:
        if time.monotonic() > until_s:
            return
        if (process := read_stat(files, pid)) is not None:
            yield pid, process.cpu_ticks
