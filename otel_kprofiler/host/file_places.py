"""Finds files that exited processes had mapped, by inode number, in mapped files' directories.

A program may exit before its mapped files can be opened. Most of these files are commands or
libraries, in the same directories as files that other processes have mapped.
"""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple

MAX_DIRECTORIES: Final = 16
MAX_ENTRIES: Final = 8192
"""Limit on listed entries per directory. Listing 8,192 entries takes about 5 ms and 1 MB."""


class _Listing(NamedTuple):
    modified_ns: int
    names: dict[int, str]  # by inode number


class FilePlaces:
    """Caches directories of mapped files, and searches them by inode number. Thread-safe."""

    def __init__(self, first: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._listings = dict.fromkeys(first, _Listing(-1, {}))
        self._being_read: set[str] = set()

    def add(self, path: str) -> None:
        """Remember the directory of a mapped file."""
        directory = os.path.dirname(path)
        with self._lock:
            self._listings[directory] = self._listings.pop(directory, _Listing(-1, {}))
            if len(self._listings) > MAX_DIRECTORIES:
                del self._listings[next(iter(self._listings))]

    def find(self, inode: int) -> Iterator[str]:
        """Yields candidate paths for an inode number on any file system; the caller verifies them.

        Skips unreadable directories. Also skips directories that another thread is still reading,
        because their file systems may hang.
        """
        with self._lock:
            directories = list(reversed(self._listings))
        for directory in directories:
            name = self._names(directory).get(inode)
            if name is not None:
                yield os.path.join(directory, name)

    def _names(self, directory: str) -> dict[int, str]:
        with self._lock:
            listing = self._listings.get(directory)
            if listing is None or directory in self._being_read:
                return {}
            self._being_read.add(directory)
        with suppress(OSError):
            listing = _read(directory, listing)
        with self._lock:
            self._being_read.discard(directory)
            if directory in self._listings:
                self._listings[directory] = listing
        return listing.names


def _read(directory: str, previous: _Listing) -> _Listing:
    modified_ns = os.stat(directory).st_mtime_ns
    if modified_ns == previous.modified_ns:
        return previous
    with os.scandir(directory) as entries:
        names = {entry.inode(): entry.name for entry in islice(entries, MAX_ENTRIES)}
    return _Listing(modified_ns, names)
