"""Counts the failed attempts to open mapped files."""

from typing import Final

from otel_kprofiler.model import FileKey

_MOST_ATTEMPTS: Final = 16
_MAX_FILES: Final = 1024


class GoneFiles:
    """Files that could not be opened; not thread-safe."""

    def __init__(self) -> None:
        self._attempts: dict[FileKey, int] = {}  # the most recent attempt last

    def add(self, key: FileKey) -> bool:
        """Count a failed attempt, and return whether to give up.

        Another process may have mapped the file. On some overlay file systems, however, a mapped
        file can never be opened.
        """
        self._attempts[key] = self._attempts.pop(key, 0) + 1
        if len(self._attempts) > _MAX_FILES:
            del self._attempts[next(iter(self._attempts))]
        return self._attempts[key] % _MOST_ATTEMPTS == 0
