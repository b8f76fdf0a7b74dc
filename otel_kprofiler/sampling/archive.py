"""Reads untrusted zip archives, enforcing limits."""

import errno
import json
import os
import struct
import zipfile
import zlib
from typing import Any, Final

from otel_kprofiler.errors import KProfilerError

MAX_ENTRY_BYTES: Final = 256 * 1024 * 1024
"""Maximum size of a decompressed entry. Sample blocks occupy 1 MiB, and kallsyms 20 MiB."""
MAX_JSON_BYTES: Final = 32 * 1024 * 1024
"""Maximum size of serialized JSON. The parsed value occupies up to 20 times as much memory."""
MAX_NAME_CHARS: Final = 512
MAX_NAME_PARTS: Final = 16

DAMAGED: Final = (
    ArithmeticError, AttributeError, EOFError, LookupError, NotImplementedError, RecursionError,
    RuntimeError, TypeError, ValueError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""Exceptions that parsing the contents of a corrupt archive may raise."""

_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Archive:
    """Reads the entries in a zip archive.

    Raises ``OSError``, or ``KProfilerError`` if the file is not a zip archive, or is a zip bomb.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except DAMAGED as error:
            raise self._damaged(error) from error
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise self._damaged(error) from error
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        entries = self._zip.infolist()
        # Overlapping entries could exceed deflate's maximum compression ratio.
        if sum(entry.compress_size for entry in entries) > os.path.getsize(self._path):
            raise self._damaged("entries overlap")
        for entry in entries:
            name = entry.filename
            if len(name) > MAX_NAME_CHARS or name.count("/") >= MAX_NAME_PARTS:
                raise self._damaged(f"the name {name[:50]!r}… is too long")
            if entry.compress_type not in _METHODS:
                raise self._damaged(f"{name!r} is not compressed with deflate")

    def names(self, prefix: str = "") -> list[str]:
        """Returns the entry names with the given prefix, in archive order."""
        return [name for name in self._zip.namelist() if name.startswith(prefix)]

    def read(self, name: str, most: int = MAX_ENTRY_BYTES) -> bytes:
        """Read an entry. Raises ``KeyError`` if it is missing, or ``KProfilerError`` if corrupt."""
        size = self._zip.getinfo(name).file_size
        if size > most:
            raise self._damaged(f"{name!r} has {size} bytes, more than {most}")
        try:
            return self._zip.read(name)
        except (OSError, *DAMAGED) as error:  # OSError: a negative file offset
            raise self._damaged(f"{name!r}: {error}") from error

    def read_json(self, name: str) -> Any:
        """Read a JSON entry. Raises the same exceptions as :meth:`read`."""
        content = self.read(name, MAX_JSON_BYTES)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"{name!r}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._zip.close()

    def _damaged(self, why: object) -> KProfilerError:
        return KProfilerError(f"{self._path} is not a recording, or is corrupt: {why}")
