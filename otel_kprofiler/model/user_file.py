"""Describes the files that contain sampled user code."""

import os
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from otel_kprofiler.model.stack import BuildId, FileId
from otel_kprofiler.model.user_stack import FileKey

VDSO_NAME: Final = "[vdso]"
_MEMFD: Final = "memfd:"
_MEMORY: Final = ("/memfd:", "/dev/zero", "/SYSV", "/anon_hugepage")
"""Names of shared memory: of memfd_create(2), mmap(2), shmget(2) and huge pages."""
MAX_FILES: Final = 16_384
"""Maximum number of files whose details are kept (about 500 bytes each)."""


class Segment(NamedTuple):
    """A loaded part of an ELF file: maps ``size`` bytes at ``offset`` to ``address`` (SVMA)."""

    offset: int
    size: int
    address: int


def find_unique(build_id: BuildId | None, *, is_go: bool) -> BuildId | None:
    """Returns the build id of a file if all files with the same build id are its copies.

    Other files may differ in bytes that a hash of their first and last pages does not cover. So may
    Go programs: ``go build -ldflags=-buildid=redacted`` gives all of them the same build id.
    """
    return None if is_go else build_id


class FileDetails(NamedTuple):
    """Details of a mapped file.

    Attributes:
        path: path as seen by the process, or ``[vdso]``.
        build_id: GNU build id; None if it is missing or the file is not an ELF file.
        file_id: hash of the file (htlhash).
        texts: executable segments, which map file offsets to addresses (SVMA).
        deleted: whether the file has been unlinked from all directories.
        is_go: whether Go's linker made the file.
    """

    path: str
    build_id: BuildId | None
    file_id: FileId
    texts: tuple[Segment, ...] = ()
    deleted: bool = False
    is_go: bool = False

    @property
    def identity(self) -> tuple[BuildId, FileId] | None:
        """Returns a value that is equal for copies of the file; None if copies are unknown."""
        build_id = find_unique(self.build_id, is_go=self.is_go)
        return (build_id, self.file_id) if build_id else None

    @property
    def may_be_generated(self) -> bool:
        """Returns whether the file is not a program, but memory that a JIT compiler maps twice."""
        return not self.texts and self.path.startswith(_MEMORY)

    @property
    def name(self) -> str:
        """Returns the last component of the path, marked if the file was deleted.

        A file from memfd_create(2) never had a directory entry, so its name, ``memfd:NAME``, is
        returned unmarked.
        """
        name = os.path.basename(self.path) or self.path
        is_held = name.startswith(_MEMFD) and self.path == f"/{name}"
        return f"{name} (deleted)" if self.deleted and not is_held else name


class OpenFile(NamedTuple):
    """An open file that has been verified to be the mapped file.

    ``size`` (bytes) and ``modified_ns`` (Unix time of last write) were read during verification.
    """

    fd: int
    size: int
    modified_ns: int

    def has_changed(self) -> bool:
        """Returns whether the file has been written to since verification. Raises ``OSError``."""
        now = os.fstat(self.fd)
        return (now.st_size, now.st_mtime_ns) != (self.size, self.modified_ns)


FileReader = Callable[[FileKey, FileDetails, OpenFile | bytes, int], None]
"""Function that receives a file's key, details, content (open file or image) and owner (pid)."""


class KnownFiles:
    """Caches details of files; evicts the oldest entries first.

    Lookups are thread-safe and lock-free. ``most`` is the maximum number of files. ``on_opened`` is
    called with each opened file, before the file's details are added, and must not block.
    """

    def __init__(self, most: int = MAX_FILES, on_opened: FileReader | None = None) -> None:
        self._files: dict[FileKey, FileDetails] = {}
        self.version = 0
        """Number that increases with each added file."""
        self._most = most
        self._on_opened = on_opened
        self._lock = threading.Lock()

    def get(self, key: FileKey) -> FileDetails | None:
        """Returns the details of a file; None if unseen, unreadable or evicted."""
        return self._files.get(key)

    def all(self) -> dict[FileKey, FileDetails]:
        """Returns the details of all files."""
        with self._lock:
            return dict(self._files)

    def add(
        self,
        key: FileKey,
        details: FileDetails,
        content: OpenFile | bytes | None = None,
        owner: int = 0,
    ) -> None:
        """Add a file.

        ``content`` is the open file, or its image in memory; None if unavailable. ``owner`` is the
        id of the process that mapped the file.
        """
        if self._on_opened is not None and content is not None:
            self._on_opened(key, details, content, owner)
        with self._lock:
            self._files.pop(key, None)
            self._files[key] = details
            self.version += 1
            while len(self._files) > self._most:
                del self._files[next(iter(self._files))]
