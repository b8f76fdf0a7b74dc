"""Finds files of processes that have ended, by inode number in directories that had others.

Programs that run for a millisecond are gone before they can be opened by their mappings. Most of
them lie beside others: in a directory for commands, or of libraries.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple

MAX_DIRECTORIES: Final = 16
MAX_ENTRIES: Final = 8192
"""Entries of one directory that are listed, which takes some 5 ms and 1 MB."""


class _Listing(NamedTuple):
    modified_ns: int
    names: dict[int, str]  # by inode number


class FilePlaces:
    """Directories, the one with the latest find last; thread-safe.

    Args:
        first: directories to begin with.
    """

    def __init__(self, first: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._listings = dict.fromkeys(first, _Listing(-1, {}))
        self._being_read: set[str] = set()

    def add(self, path: str) -> None:
        """A file was found here."""
        directory = os.path.dirname(path)
        with self._lock:
            self._listings[directory] = self._listings.pop(directory, _Listing(-1, {}))
            if len(self._listings) > MAX_DIRECTORIES:
                del self._listings[next(iter(self._listings))]

    def find(self, inode: int) -> Iterator[str]:
        """Files with an inode number, of any file system: whether one is the right one is to prove.

        Directories are read again when they have changed; unreadable ones have nothing, nor has one
        that another thread reads: its file system may not answer.
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


def _read(directory: str, before: _Listing) -> _Listing:
    """Lists a directory. Raises ``OSError``."""
    modified_ns = os.stat(directory).st_mtime_ns
    if modified_ns == before.modified_ns:
        return before
    with os.scandir(directory) as entries:
        names = {entry.inode(): entry.name for entry in islice(entries, MAX_ENTRIES)}
    return _Listing(modified_ns, names)
