"""User files with sampled code."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from otel_kprofiler.model.stack import BuildId, FileId
from otel_kprofiler.model.user_stack import FileKey

VDSO_NAME: Final = "[vdso]"
_MEMFD: Final = "memfd:"
MAX_FILES: Final = 16_384
"""Limit on files with details, some 500 bytes each; they outlive the tables."""


class Segment(NamedTuple):
    """A loaded part of an ELF file: ``size`` bytes at ``offset`` appear at ``address`` (SVMA)."""

    offset: int
    size: int
    address: int


class FileDetails(NamedTuple):
    """A file.

    Attributes:
        path: as seen by its process, or ``[vdso]``.
        build_id: GNU build id; None if it has none or is not an ELF file.
        file_id: hash of the file (htlhash).
        texts: executable segments, which map file offsets to addresses (SVMA).
        deleted: whether no directory has an entry of the file.
    """

    path: str
    build_id: BuildId | None
    file_id: FileId
    texts: tuple[Segment, ...] = ()
    deleted: bool = False

    @property
    def name(self) -> str:
        """Returns the last part of the path, marked if the file was deleted.

        A file of memfd_create(2), which was never in a directory, has the kernel's name:
        ``memfd:NAME``.
        """
        name = os.path.basename(self.path) or self.path
        is_held = name.startswith(_MEMFD) and self.path == f"/{name}"
        return f"{name} (deleted)" if self.deleted and not is_held else name


class OpenFile(NamedTuple):
    """The content of a file that was verified to be the mapped file.

    Attributes:
        fd: open for reading.
        size: in bytes, when verified.
        modified_ns: Unix time of the last write, read with ``size``.
    """

    fd: int
    size: int
    modified_ns: int

    def has_changed(self) -> bool:
        """Returns whether the file was written since. Raises ``OSError``."""
        now = os.fstat(self.fd)
        return (now.st_size, now.st_mtime_ns) != (self.size, self.modified_ns)


FileReader = Callable[[FileKey, FileDetails, OpenFile | bytes, int], None]
"""Takes a file (open during the call) or its image in memory, and the process that mapped it."""


class KnownFiles:
    """Details by file; the oldest are evicted first. Look-ups take no lock, from any thread.

    Args:
        most: maximum number of files.
        on_opened: called with each opened file, before its details are added; must not wait.
    """

    def __init__(self, most: int = MAX_FILES, on_opened: FileReader | None = None) -> None:
        self._files: dict[FileKey, FileDetails] = {}
        self.version = 0
        """Grows with each added file."""
        self._most = most
        self._on_opened = on_opened
        self._lock = threading.Lock()

    def get(self, key: FileKey) -> FileDetails | None:
        """Returns details of a file; None if unseen, unreadable or evicted."""
        return self._files.get(key)

    def all(self) -> dict[FileKey, FileDetails]:
        """Returns details of all files."""
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

        Args:
            key: the file.
            details: its details.
            content: the open file, or its image in memory; None if unavailable.
            owner: id of the process that mapped it.
        """
        if self._on_opened is not None and content is not None:
            self._on_opened(key, details, content, owner)
        with self._lock:
            self._files.pop(key, None)
            self._files[key] = details
            self.version += 1
            while len(self._files) > self._most:
                del self._files[next(iter(self._files))]
