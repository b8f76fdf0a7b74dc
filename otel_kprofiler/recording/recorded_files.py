"""Provides the files of the recorded host."""

import errno
import os
from collections.abc import Mapping

from otel_kprofiler.host import open_in_memory
from otel_kprofiler.sampling import Archive


class RecordedFiles:
    """A :class:`HostFiles` that reads from the archive of a recording."""

    def __init__(self, archive: Archive, errors: Mapping[str, int]) -> None:
        self._archive = archive
        self._errors = errors
        self._children: dict[str, set[str]] = {}
        for name in archive.names("files/"):
            self._add_parents(name.removeprefix("files"))

    def open_fd(self, path: str) -> int:
        """Open an in-memory copy of a file. The caller closes the descriptor."""
        return open_in_memory("recorded", self.read_bytes(path))

    def read_bytes(self, path: str) -> bytes:
        """Returns the entire contents of a file."""
        try:
            return self._archive.read("files" + path)
        except KeyError:
            raise self._absent(path) from None

    def list_dir(self, path: str) -> list[str]:
        """Returns the sorted names in a directory."""
        children = self._children.get(path.rstrip("/"))
        if children is None:
            raise self._absent(path)
        return sorted(children)

    def read_link(self, path: str) -> str:
        """Raise ``OSError``: recordings contain no links."""
        raise self._absent(path)

    def _absent(self, path: str) -> OSError:
        code = self._errors.get(path, errno.ENOENT)
        return OSError(code, os.strerror(code), path)

    def _add_parents(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        while name and name not in self._children.setdefault(parent, set()):
            self._children[parent].add(name)
            parent, _, name = parent.rpartition("/")
