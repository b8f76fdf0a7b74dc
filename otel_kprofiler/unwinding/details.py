"""What is known about a user file that code was sampled in."""

from __future__ import annotations

import os
import threading
from typing import Final, NamedTuple

from otel_kprofiler.model import BuildId, FileId, FileKey
from otel_kprofiler.unwinding.elf import Segment

VDSO_NAME: Final = "[vdso]"
MAX_FILES: Final = 16_384
"""Files whose details are kept, some 500 bytes each; they outlive the tables."""


class FileDetails(NamedTuple):
    """A file.

    Attributes:
        path: as its process sees it, or ``[vdso]``.
        build_id: GNU build id; None if it has none or is no ELF file.
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
        """The last part of the path."""
        return os.path.basename(self.path) or self.path


class KnownFiles:
    """Details by file, the oldest forgotten first. Any thread may look up; it waits for none."""

    def __init__(self, most: int = MAX_FILES) -> None:
        self._files: dict[FileKey, FileDetails] = {}
        self._most = most
        self._lock = threading.Lock()

    def get(self, key: FileKey) -> FileDetails | None:
        """Details of a file; None if it was not seen, could not be opened, or was forgotten."""
        return self._files.get(key)

    def add(self, key: FileKey, details: FileDetails) -> None:
        """Remember a file."""
        with self._lock:
            self._files.pop(key, None)
            self._files[key] = details
            while len(self._files) > self._most:
                del self._files[next(iter(self._files))]
