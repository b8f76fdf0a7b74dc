"""Saves samples during a recording, to ``NAME.part`` next to the output file.

The file contains one length-prefixed message per second, like the Collector's files, and is deleted
when the output file is complete. If the recording is killed, the file remains readable up to the
last second. During a recording, the file is locked (flock(2)). The lock keeps other recordings from
writing the same output, and distinguishes the file from those of killed recordings.
"""

import contextlib
import errno
import fcntl
import os
import stat
from typing import Final

from otel_kprofiler.delivery import Reporter
from otel_kprofiler.export import ExportQueue, FileExporter
from otel_kprofiler.model import Form, Window
from otel_kprofiler.pipeline import WindowSchedule

SCHEDULE: Final = WindowSchedule(1_000_000_000)
"""Writes once a second, so a killed recording loses at most the last second of samples."""
_SUFFIX: Final = ".part"
_HEAD_BYTES: Final = 5
_FIELDS: Final = b"\n\x12"
"""The protobuf tags that a message may begin with; they identify part files."""
_MOST: Final = 100
_TIMEOUT_MILLIS: Final = 5_000


class PartFile:
    """Keeps samples in a ``.part`` file until the output file is complete.

    The ``path`` argument is the path of the output file. Raises ``BlockingIOError`` if another
    recording is being written to ``path``.

    Attributes:
        path: the path of the ``.part`` file.
        missing: after :meth:`close`, the number of samples that could not be written, for example
            because the disk was full.
    """

    def __init__(self, path: str) -> None:
        self.path, self._fd = _create(path)
        self.missing = 0
        if any(_is_locked(other) for other in _names(path) if other != self.path):
            os.unlink(self.path)
            os.close(self._fd)
            raise BlockingIOError
        exporter = FileExporter(self.path, form=Form.PROTOBUF, name="part file")
        self._reporter = Reporter([ExportQueue(exporter)])

    def __call__(self, window: Window) -> None:
        """Write a window without waiting for the disk."""
        self._reporter(window)

    def close(self, *, keep: bool) -> bool:
        """Delete the file, unless ``keep`` is set and samples were written to it.

        Return whether it was kept.
        """
        if self._fd < 0:
            return False
        self._reporter.shutdown(_TIMEOUT_MILLIS if keep else 0)
        (account,) = self._reporter.accounts()
        self.missing = sum(account.lost.values()) + account.pending
        kept = keep and account.exported > 0
        if not kept:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        os.close(self._fd)
        self._fd = -1
        return kept


def find_dead(directory: str) -> list[str]:
    """Returns the part files in a directory that were left by this user's killed recordings."""
    try:
        names = os.listdir(directory or ".")
    except OSError:
        return []
    paths = [os.path.join(directory, name) for name in sorted(names) if name.endswith(_SUFFIX)]
    return [path for path in paths if _is_locked(path) is False]


def _create(path: str) -> tuple[str, int]:
    """Create and lock a file with an unused name next to ``path``."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for name in _names(path):
        try:
            fd = os.open(name, flags, 0o600)
        except FileExistsError:
            continue
        with contextlib.suppress(OSError):  # the file system does not support locks
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return name, fd
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def _names(path: str) -> list[str]:
    return [path + _SUFFIX, *(f"{path}.{number}{_SUFFIX}" for number in range(2, _MOST))]


def _is_locked(path: str) -> bool | None:
    """Returns whether this user is recording to a file; None if the file is not a part file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb") as file:
        there = os.fstat(fd)
        if not stat.S_ISREG(there.st_mode) or there.st_uid != os.geteuid():
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        head = file.read(_HEAD_BYTES)
    return False if head[:1] == b"\0" and head[4:] in _FIELDS else None
