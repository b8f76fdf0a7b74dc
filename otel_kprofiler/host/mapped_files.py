"""Opens files that processes have mapped, with as few privileges as possible.

======================  ==============================================  ==========================
What                    Requires, for other users' processes            Finds
======================  ==============================================  ==========================
/proc/PID/map_files/…   CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN;        every mapped file
                        CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH
/proc/PID/exe           CAP_SYS_PTRACE                                  the executable
/proc/PID/root + path   CAP_SYS_PTRACE                                  files that are not deleted
path                    nothing                                         the same, in our mounts
                                                                        or next to other files
======================  ==============================================  ==========================

The path is tried relative to this process's root and to the mapping process's root. A file's
identity is checked before the file is opened for reading, because the path may lead to a different
file, or to a device. Reading requires read permission on the file or CAP_DAC_READ_SEARCH.
"""

from __future__ import annotations

import enum
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple, Protocol

from otel_kprofiler.errors import KProfilerError, describe_error
from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.maps import DELETED, MINOR_BITS, parse_mappings, read_maps
from otel_kprofiler.model import FileKey, OpenFile

_MAX_RANGES: Final = 4  # number of mappings tried for a file whose first mapping was removed
_RIGHTS: Final = (errno.EPERM, errno.EACCES)
_ABSENT: Final = (errno.ENOENT, errno.ESRCH, errno.ENOTDIR)


class FileProblem(enum.Enum):
    """The reason why a mapped file could not be opened; the value is shown to users."""

    GONE = "the process had exited, or unmapped the file, before it could be opened"
    NOT_SAME = "the file that could be opened is not the mapped file"
    UNREADABLE = "the file could not be read"
    FORBIDDEN = "this process may not open the file"


class MappedFileError(KProfilerError):
    """Raised if a mapped file could not be opened; ``detail`` is for the log."""

    def __init__(self, problem: FileProblem, detail: str = "") -> None:
        super().__init__(f"{problem.value} ({detail})" if detail else problem.value)
        self.problem = problem
        self.detail = detail


class FileRequest(NamedTuple):
    """A request to open a mapped file, with the mapping as it was when the sample was taken.

    Attributes:
        file_offset: file offset of the byte mapped at ``start``.
        tgid: id of a process that has mapped the file.
        size: size of the file in bytes; 0 if unknown.
        modified: last write time, as seconds (modulo 2^32) << 32 | nanoseconds; 0 if unknown.
    """

    key: FileKey
    start: int
    end: int
    file_offset: int
    tgid: int
    tid: int
    size: int = 0
    modified: int = 0


class ReferableFiles(HostFiles, Protocol):
    """Host files that can be opened without side effects, as references (``O_PATH``)."""

    def open_reference(self, path: str) -> int:
        """Open a file as a reference (``O_PATH``), which has no effect on the file."""

    def open_reference_in(self, root: str, path: str) -> int:
        """Open a file as a reference, with its path and links resolved relative to ``root``."""


def open_regular(files: ReferableFiles, path: str, root: str = "") -> OpenFile:
    """Open a regular file; the caller closes its descriptor.

    Raises ``OSError`` for devices and other special files, because opening them might block or have
    side effects. The path and its links are resolved within ``root``, such as ``/proc/PID/root``.
    """
    reference = files.open_reference_in(root, path) if root else files.open_reference(path)
    try:
        status = os.fstat(reference)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        # The path may refer to another file by now. Do not wait for a lease holder (fcntl(2)).
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(f"/proc/self/fd/{reference}", flags)
        return OpenFile(fd, status.st_size, status.st_mtime_ns)
    finally:
        os.close(reference)


class OpenedFile(NamedTuple):
    """A mapped file, open for reading.

    Attributes:
        fd: descriptor, which the recipient of this object must close.
        path: path that the kernel shows for the mapping, without `` (deleted)``.
        route: how the file was reached: ``map_files``, ``exe``, ``root`` or ``path``.
        reached_at: path at which the file was opened.
    """

    fd: int
    status: os.stat_result
    path: str
    route: str
    reached_at: str

    @property
    def deleted(self) -> bool:
        """Returns whether the file was deleted, or never had a name (memfd_create(2))."""
        return self.status.st_nlink == 0

    @property
    def content(self) -> OpenFile:
        """Returns the open file, which is valid until :meth:`close`."""
        return OpenFile(self.fd, self.status.st_size, self.status.st_mtime_ns)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


class _OtherInodeError(MappedFileError):
    """Raised if the opened file is certainly not the mapped file, because its inode differs."""


class _Way(NamedTuple):
    route: str
    opened: str  # the path that is opened
    path: str  # the path that is reported


def open_mapped(
    request: FileRequest,
    files: ReferableFiles,
    known_path: str = "",
    find_places: Callable[[int], Iterable[str]] | None = None,
) -> OpenedFile:
    """Open the requested file.

    Falls back to ``known_path``, the path at which the file was last opened. If that path does not
    exist either, and the request contains the file's size and modification time, tries the paths
    that ``find_places`` yields for the inode number.

    Raises ``MappedFileError`` if the file was removed or replaced, or opening it is not permitted.
    """
    outcome = _Outcome(FileProblem.GONE, "")
    has_gone = False  # whether the requested range now maps a different file
    for way in _ways(request, files, known_path):
        try:
            return _open(way, request, files)
        except OSError as error:
            outcome = outcome.or_worse(_problem_of(error), describe_error(error))
        except _OtherInodeError as error:
            has_gone |= way.route == "map_files"
            if way.route != "exe" and not has_gone:  # exe is usually a different file
                outcome = outcome.or_worse(error.problem, way.path)
        except MappedFileError as error:
            outcome = outcome.or_worse(error.problem, way.path)
    is_certain = request.size and request.modified
    if outcome.problem is FileProblem.GONE and is_certain and find_places:
        for path in find_places(request.key.inode):
            with suppress(OSError, MappedFileError):
                return _open(_Way("path", path, path), request, files)
    raise MappedFileError(*outcome)


class _Outcome(NamedTuple):
    problem: FileProblem
    detail: str

    def or_worse(self, problem: FileProblem, detail: str) -> _Outcome:
        """Returns the more specific of two errors."""
        worse = _RANKS.index(problem) > _RANKS.index(self.problem)
        return _Outcome(problem, detail) if worse else self


_RANKS: Final = tuple(FileProblem)  # the most specific error is last


def _problem_of(error: OSError) -> FileProblem:
    if error.errno in _RIGHTS:
        return FileProblem.FORBIDDEN
    return FileProblem.GONE if error.errno in _ABSENT else FileProblem.UNREADABLE


def _open(way: _Way, request: FileRequest, files: ReferableFiles) -> OpenedFile:
    """Raises ``OSError``, or ``MappedFileError`` if the file is not the requested one."""
    reference = files.open_reference(way.opened)
    try:
        status = os.fstat(reference)
        if status.st_ino != request.key.inode:
            raise _OtherInodeError(FileProblem.NOT_SAME)
        if not is_same_file(request, status, mapped=way.route == "map_files"):
            raise MappedFileError(FileProblem.NOT_SAME)
        # The path may refer to a different file by now.
        fd = files.open_fd(f"/proc/self/fd/{reference}")
        return OpenedFile(fd, status, way.path, way.route, way.opened)
    finally:
        os.close(reference)


def _ways(request: FileRequest, files: ReferableFiles, known_path: str) -> Iterator[_Way]:
    """Yields ways to open a requested file, most reliable first."""
    paths = []
    for pid in dict.fromkeys((request.tgid, request.tid)):  # the main thread may have exited
        process = f"/proc/{pid}"
        for name, path in _mappings(request, files, pid):
            yield _Way("map_files", f"{process}/map_files/{name}", path)
            if path.startswith("/"):  # a file, not anonymous memory
                paths.append((process, path))
    for process, path in dict.fromkeys(paths):
        yield _Way("exe", f"{process}/exe", path)
        yield _Way("root", f"{process}/root{path}", path)
        yield _Way("path", path, path)
    if known_path:
        yield _Way("path", known_path, known_path)


def _mappings(request: FileRequest, files: ReferableFiles, pid: int) -> Iterator[tuple[str, str]]:
    """Yields the file's map_files entries and their paths, starting with the requested mapping."""
    wanted = f"{request.start:x}-{request.end:x}"
    try:
        path = files.read_link(f"/proc/{pid}/map_files/{wanted}")
        yield wanted, path.removesuffix(DELETED)
    except OSError:
        yield wanted, ""  # opening this entry will raise the error again
        with suppress(OSError):
            mapped = (
                (f"{mapping.start:x}-{mapping.end:x}", mapping.path)
                for mapping in parse_mappings(read_maps(files, pid))
                if mapping.inode == request.key.inode and mapping.is_executable
            )
            yield from islice(mapped, _MAX_RANGES)


def is_same_file(request: FileRequest, status: os.stat_result, *, mapped: bool = False) -> bool:
    """Returns whether a file is the requested file.

    Inode, size, modification time and device must match, because inode numbers may be reused
    immediately. On overlayfs and btrfs, ``stat`` reports an anonymous device (major 0) instead of
    the inode's device. On these file systems, the device is ignored if the request contains a size,
    or if the file was opened through ``map_files`` (``mapped``).
    """
    if not stat.S_ISREG(status.st_mode) or status.st_ino != request.key.inode:
        return False
    if request.size not in (0, status.st_size):
        return False
    if request.modified not in (0, modification_time(status.st_mtime_ns)):
        return False
    major, minor = os.major(status.st_dev), os.minor(status.st_dev)
    if major << MINOR_BITS | minor == request.key.device:
        return True
    return major == 0 and (mapped or request.size > 0)


def modification_time(unix_ns: int) -> int:
    """Converts a file's modification time to the format of ``FileRequest.modified``."""
    seconds, ns = divmod(unix_ns, 1_000_000_000)
    return (seconds & 0xFFFFFFFF) << 32 | ns
