"""Reopens files whose symbols have been evicted."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from otel_kprofiler.elf import ElfError, FileSource, hash_file, read_elf
from otel_kprofiler.host import (
    FileRequest,
    MappedFileError,
    ReferableFiles,
    find_vdso,
    modification_time,
    open_mapped,
    open_regular,
    parse_mappings,
    read_maps,
)
from otel_kprofiler.model import VDSO_NAME, FileDetails, FileKey, OpenFile

MAX_SCAN_NS: Final = 1_000_000_000
"""CPU time limit for a search through all processes."""
_MAX_LIKELY: Final = 64


class WantedFile(NamedTuple):
    """A file that may have to be reopened.

    ``owner`` is the pid of a process that has mapped the file. ``modified_ns`` is the Unix time of
    the file's last modification. Unknown values are 0.
    """

    key: FileKey
    details: FileDetails
    owner: int = 0
    size: int = 0
    modified_ns: int = 0


def reopen(wanted: WantedFile, files: ReferableFiles) -> OpenFile | bytes | None:
    """Reopens a file through a process that maps it, even if the file was deleted.

    The opened file matches the requested inode number, size, modification time, hash and build id.
    If no visible process maps the file, opens the file at the same path, provided that it has the
    requested hash and build id. Returns the open file, which the caller must close, or the vDSO
    image; None if not found.
    """
    details = wanted.details
    if details.path == VDSO_NAME:
        with suppress(OSError):
            return find_vdso(files)
        return None
    for request in _find_requests(wanted, files):
        with suppress(MappedFileError, OSError):
            file = open_mapped(request, files, details.path).content
            if _is_same(file, details):
                return file
            os.close(file.fd)
    if details.build_id and not details.deleted:
        with suppress(OSError):
            file = open_regular(files, details.path)
            if _is_same(file, details):
                return file
            os.close(file.fd)
    return None


def _is_same(file: OpenFile, details: FileDetails) -> bool:
    source = FileSource(file.fd, file.size)
    with suppress(ElfError):
        is_equal = hash_file(source) == details.file_id
        return is_equal and read_elf(source, None).build_id == details.build_id
    return False


def _find_requests(wanted: WantedFile, files: ReferableFiles) -> Iterator[FileRequest]:
    """Yields requests to open the file through processes that map it, most reliable first.

    On overlayfs, ``/proc/PID/maps`` shows a device other than the inode's (file_user_inode(),
    include/linux/fs.h). Requests that match only by inode number and path are yielded last.
    """
    key, modified = wanted.key, modification_time(wanted.modified_ns)
    likely: list[FileRequest] = []
    for pid in _list_processes(wanted.owner, files):
        with suppress(OSError):
            maps = read_maps(files, pid)
            if b" %d " % key.inode not in maps:
                continue
            for mapping in parse_mappings(maps, only_code=True):
                if mapping.inode != key.inode:
                    continue
                request = FileRequest(
                    key, mapping.start, mapping.end, mapping.file_offset, pid, pid, wanted.size,
                    modified,
                )  # fmt: skip
                if mapping.device == key.device:
                    yield request
                    break
                if mapping.path == wanted.details.path and len(likely) < _MAX_LIKELY:
                    likely.append(request)
                    break
    yield from likely
    if wanted.size and modified:
        # falls back to opening the file by its path
        yield FileRequest(key, 0, 0, 0, 0, 0, wanted.size, modified)


def _list_processes(first: int, files: ReferableFiles) -> Iterator[int]:
    """Yields ``first``, then other pids in descending order, within the CPU time limit."""
    if first:
        yield first
    began_ns = time.thread_time_ns()
    pids = [int(name) for name in files.list_dir("/proc") if name.isdecimal()]
    for pid in sorted(pids, reverse=True):
        if time.thread_time_ns() - began_ns > MAX_SCAN_NS:
            return
        if pid != first:
            yield pid
