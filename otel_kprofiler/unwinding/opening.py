"""Opens a file that a process has mapped, by the least right that is enough.

======================  ==============================================  ======================
What                    Needs, for processes of others                  Finds
======================  ==============================================  ======================
/proc/PID/map_files/…   CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN;        every mapped file
                        CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH
/proc/PID/exe           CAP_SYS_PTRACE                                  the executable
/proc/PID/root + path   CAP_SYS_PTRACE                                  files not deleted
path                    nothing                                         likewise, in our mounts
======================  ==============================================  ======================

Reading the file itself needs its own permission, or CAP_DAC_READ_SEARCH. The path comes from the
symbolic link in map_files, or from /proc/PID/maps. It is shown as seen from this process's root
where it can be reached from there, else from the root of the process's own mounts; so both are
tried. Nothing is opened for reading before its identity is proven: mapped files may be devices, and
a path may lead to anything by now.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from otel_kprofiler.host import HostFiles
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused
from otel_kprofiler.unwinding.request import FileRequest, is_same_file

_DELETED: Final = " (deleted)"
_MAX_RANGES: Final = 4  # of a file whose first mapping has gone
_RIGHTS: Final = (errno.EPERM, errno.EACCES)
_ABSENT: Final = (errno.ENOENT, errno.ESRCH, errno.ENOTDIR)


class Files(HostFiles, Protocol):
    """Files of this host that can be looked at before they are opened."""

    def open_reference(self, path: str) -> int:
        """Open as a mere reference (``O_PATH``), which has no effect on the file."""


class OpenedFile(NamedTuple):
    """A mapped file, open for reading.

    Attributes:
        fd: owned by whoever got this.
        status: of the file when it was opened.
        path: as the kernel shows it for the process, without `` (deleted)``.
        route: how it was reached: ``map_files``, ``exe``, ``root``, ``path``.
    """

    fd: int
    status: os.stat_result
    path: str
    route: str

    @property
    def deleted(self) -> bool:
        """Whether no directory has it any more, or ever had (memfd_create(2))."""
        return self.status.st_nlink == 0

    def has_changed(self) -> bool:
        """Whether it was written since it was opened."""
        now, then = os.fstat(self.fd), self.status
        return (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


class _Way(NamedTuple):
    route: str
    opened: str  # what is opened
    path: str  # what it is called


def open_mapped(request: FileRequest, files: Files, known_path: str = "") -> OpenedFile:
    """Open the file of a request.

    Args:
        request: names the file and a process that has it mapped.
        files: this host's.
        known_path: where the file was when it was opened before; for a process that has ended.

    Raises:
        TableRefused: it is gone, this process may not open it, or other files are in its place.
    """
    outcome = _Outcome(Refusal.GONE, "")
    for way in _ways(request, files, known_path):
        try:
            return _open(way, request, files)
        except OSError as error:
            outcome = outcome.or_worse(_refusal_of(error), str(error))
        except TableRefused as error:
            if way.route != "exe":  # which mostly is another file
                outcome = outcome.or_worse(error.refusal, way.path)
    raise TableRefused(*outcome)


class _Outcome(NamedTuple):
    refusal: Refusal
    detail: str

    def or_worse(self, refusal: Refusal, detail: str) -> _Outcome:
        """That of the two which says more about why no way led to the file."""
        worse = _RANKS.index(refusal) > _RANKS.index(self.refusal)
        return _Outcome(refusal, detail) if worse else self


_RANKS: Final = (Refusal.GONE, Refusal.NOT_SAME, Refusal.UNREADABLE, Refusal.FORBIDDEN)


def _refusal_of(error: OSError) -> Refusal:
    if error.errno in _RIGHTS:
        return Refusal.FORBIDDEN
    return Refusal.GONE if error.errno in _ABSENT else Refusal.UNREADABLE


def _open(way: _Way, request: FileRequest, files: Files) -> OpenedFile:
    """Open what a way leads to. Raises ``OSError``, or ``TableRefused`` if it is another file."""
    reference = files.open_reference(way.opened)
    try:
        status = os.fstat(reference)
        if not is_same_file(request, status, mapped=way.route == "map_files"):
            raise TableRefused(Refusal.NOT_SAME)
        # Opened for reading by the reference: a path may lead elsewhere a second time.
        fd = files.open_fd(f"/proc/self/fd/{reference}")
        return OpenedFile(fd, status, way.path, way.route)
    finally:
        os.close(reference)


def _ways(request: FileRequest, files: Files, known_path: str) -> Iterator[_Way]:
    """Ways to the file, the surest first."""
    found = []
    for pid in dict.fromkeys((request.tgid, request.tid)):  # the leader of a process may have ended
        process = f"/proc/{pid}"
        for name, path in _mappings(request, files, process):
            path = path.removesuffix(_DELETED)  # noqa: PLW2901 - what the kernel adds to it
            yield _Way("map_files", f"{process}/map_files/{name}", path)
            if path.startswith("/"):  # not a memory area without a name
                found.append((process, path))
    for process, path in dict.fromkeys(found):
        yield _Way("exe", f"{process}/exe", path)
        yield _Way("root", f"{process}/root{path}", path)
        yield _Way("path", path, path)
    if known_path:
        yield _Way("path", known_path, known_path)


def _mappings(request: FileRequest, files: Files, process: str) -> Iterator[tuple[str, str]]:
    """Mappings of the file with its path: that of the request, then others if that has gone.

    The links in map_files tell the path; where they may not be read, the maps do.
    """
    wanted = f"{request.start:x}-{request.end:x}"
    try:
        yield wanted, files.read_link(f"{process}/map_files/{wanted}")
    except OSError:
        yield wanted, ""  # opening it fails likewise, and tells why
        with suppress(OSError):
            maps = files.read_bytes(f"{process}/maps")
            yield from find_mappings(maps, request.key.inode)[:_MAX_RANGES]


def find_mappings(maps: bytes, inode: int) -> list[tuple[str, str]]:
    r"""Executable mappings of an inode in ``/proc/PID/maps``: name in map_files, and path.

    See proc_pid_maps(5). A newline in a path is written as ``\012``.
    """
    found = []
    number = b"%d" % inode
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[4] == number and b"x" in fields[1]:
            start, _, end = fields[0].decode("ascii", "replace").partition("-")
            path = os.fsdecode(fields[5].replace(rb"\012", b"\n"))
            found.append((f"{start.lstrip('0')}-{end.lstrip('0')}", path))
    return found
