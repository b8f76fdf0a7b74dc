"""User files that code was sampled in."""

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
"""Files whose details are kept, some 500 bytes each; they outlive the tables."""


class Segment(NamedTuple):
    """A loaded part of an ELF file: ``size`` bytes at ``offset`` appear at ``address`` (SVMA)."""

    offset: int
    size: int
    address: int


class FileDetails(NamedTuple):
    """A file.

    Attributes:
        path: as its process sees it, or ``[vdso]``.
        build_id: GNU build id; None if it has none or is not an ELF file.
        file_id: hash of the file (htlhash).
        texts: executable segments, by which offsets in the file become addresses (SVMA).
        deleted: no directory has the file any more, or ever had.
    """

    path: str
    build_id: BuildId | None
    file_id: FileId
    texts: tuple[Segment, ...] = ()
    deleted: bool = False

    @property
    def name(self) -> str:
        """The last part of the path, and whether the file was deleted.

        A file of memfd_create(2), which was never in a directory, is named as the kernel does:
        ``memfd:NAME``.
        """
        name = os.path.basename(self.path) or self.path
        is_held = name.startswith(_MEMFD) and self.path == f"/{name}"
        return f"{name} (deleted)" if self.deleted and not is_held else name


class OpenFile(NamedTuple):
    """The content of a file that was found to be the mapped one.

    Attributes:
        fd: open for reading.
        size: in bytes, when it was found to be that file.
        modified_ns: Unix time at which it was written last, read with ``size``.
    """

    fd: int
    size: int
    modified_ns: int

    def has_changed(self) -> bool:
        """Returns whether it was written since. Raises ``OSError``."""
        now = os.fstat(self.fd)
        return (now.st_size, now.st_mtime_ns) != (self.size, self.modified_ns)


FileReader = Callable[[FileKey, FileDetails, OpenFile | bytes, int], None]
"""Takes a file, which is open during the call, or its image in memory; and the process that has
mapped it."""


class KnownFiles:
    """Details by file, the oldest forgotten first. Any thread may look up; it waits for none.

    Args:
        most: files to remember.
        on_opened: called with each file that was opened, before it is known; must not wait.
    """

    def __init__(self, most: int = MAX_FILES, on_opened: FileReader | None = None) -> None:
        self._files: dict[FileKey, FileDetails] = {}
        self.version = 0
        """Grows whenever more is known."""
        self._most = most
        self._on_opened = on_opened
        self._lock = threading.Lock()

    def get(self, key: FileKey) -> FileDetails | None:
        """Details of a file; None if it was not seen, could not be opened, or was forgotten."""
        return self._files.get(key)

    def all(self) -> dict[FileKey, FileDetails]:
        """Details of all known files."""
        with self._lock:
            return dict(self._files)

    def add(
        self,
        key: FileKey,
        details: FileDetails,
        content: OpenFile | bytes | None = None,
        owner: int = 0,
    ) -> None:
        """Remember a file.

        Args:
            key: the file.
            details: what is known about it.
            content: the open file, or its image in memory; None: it is not at hand.
            owner: id of the process that has mapped it.
        """
        if self._on_opened is not None and content is not None:
            self._on_opened(key, details, content, owner)
        with self._lock:
            self._files.pop(key, None)
            self._files[key] = details
            self.version += 1
            while len(self._files) > self._most:
                del self._files[next(iter(self._files))]
