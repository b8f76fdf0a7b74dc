"""Writes OTLP to files as JSON lines or length-prefixed protobuf, and rotates the files.

A JSON file contains one request per line (OpenTelemetry specification, "OpenTelemetry Protocol File
Exporter"). Each protobuf request is preceded by its length in four big-endian bytes, as in the
files that the Collector's file exporter writes.
"""

import datetime as dt
import errno
import logging
import os
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from otel_kprofiler.errors import ExportError, describe_error
from otel_kprofiler.export.base import ExportResult, ProfileExporter
from otel_kprofiler.forks import ProcessLock
from otel_kprofiler.host import AppendedFile, write_all
from otel_kprofiler.model import AttributeForm, Batch, Form, LossCause

STDOUT: Final = "-"
_MODE: Final = 0o600
LENGTH: Final = struct.Struct(">I")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rotation:
    """When to rename a file to a backup, ``NAME-TIME.SUFFIX``, and when to delete backups.

    Attributes:
        max_bytes: maximum size of the file in bytes. The file is rotated before a batch that would
            make it exceed this size; 0 means no limit.
        max_age_s: seconds after which an open file is rotated; 0 means never.
        max_backups: maximum number of backups; the newest are kept. 0 means no limit.
        max_backup_age_s: age in seconds at which backups are deleted; 0 means never.
    """

    max_bytes: int = 100 * 1024 * 1024
    max_age_s: float = 0
    max_backups: int = 100
    max_backup_age_s: float = 0


class FileExporter(ProfileExporter):
    """Appends each batch to a file atomically. The batch is immediately visible to readers.

    Only one process at a time may write to a file.

    Args:
        path: path of the output file, which is created with mode 0600 because it may reveal kernel
            addresses. An existing file keeps its permissions, and the files that replace it inherit
            them. ``-`` is standard output.
        form: JSON lines, or length-prefixed protobuf messages.
        rotation: when to rotate the file; None for never. Only regular files are rotated.
        now: returns the Unix time in seconds.

    Raises:
        ExportError: the file cannot be written, or is a protobuf file that ends mid-message.
    """

    max_bytes = None

    def __init__(
        self,
        path: str,
        *,
        form: Form = Form.JSON,
        rotation: Rotation | None = None,
        attributes: AttributeForm = AttributeForm.INLINE,
        name: str = "file",
        now: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self.form = form
        self.attributes = attributes
        self._path = path
        self._now = now
        self._broken = ""
        self._busy = ProcessLock()
        self._stopped = threading.Event()
        self._rotation = rotation
        self._file: AppendedFile | None = None
        if path == STDOUT:
            self._fd = sys.stdout.fileno()
            return
        try:
            self._open(_MODE)
        except OSError as error:
            raise ExportError(
                f"cannot write {path}: {error.strerror}",
                hint=f"choose a file in an existing directory writable by this user, not {path}",
            ) from error

    @property
    def destination(self) -> str:
        """Returns the path of the output file."""
        return self._path

    def _open(self, mode: int) -> None:
        """Open the output file, with the permissions ``mode`` if it is new."""
        file = AppendedFile(self._path, mode=mode)
        self._opened = self._now()
        try:
            if file.regular:
                self._continue_file(file.fd)
        except BaseException:
            file.close()
            raise
        if self._file:
            self._file.close()
        self._file, self._fd = file, file.fd

    def export(self, batch: Batch) -> ExportResult:
        """Append a batch to the file as one record."""
        with self._busy:
            if self._stopped.is_set():
                return ExportResult.failure(batch, LossCause.SHUTDOWN, "already shut down")
            result = self._write(batch)
            if self._stopped.is_set():
                self._close()
            return result

    def _write(self, batch: Batch) -> ExportResult:
        if self.form is Form.JSON:
            # In JSON, a newline can only occur as white space between tokens.
            record = batch.payload.replace(b"\n", b" ") + b"\n"
        else:
            record = LENGTH.pack(len(batch.payload)) + batch.payload
        try:
            self._prepare(len(record))
            self._append(record)
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "")
            return self._fail(batch, f"cannot write {self._path}: {error.strerror}", code)
        except ExportError as error:
            # The file was replaced by a file that does not end with a complete message.
            return self._fail(batch, error.message, "")
        self._broken = ""
        return ExportResult.success(batch)

    def _fail(self, batch: Batch, message: str, code: str) -> ExportResult:
        if message != self._broken:
            _log.warning("%s: %s; dropping samples (logged once)", self.name, message)
        self._broken = message
        return ExportResult.failure(batch, LossCause.WRITE_FAILED, message, code)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Close the file. If an export outlasts the timeout, that export closes the file."""
        self._stopped.set()
        # Closing the file during an export could make the export write to a reused descriptor.
        if self._busy.acquire(timeout_millis / 1000):
            self._close()
            self._busy.release()

    def _close(self) -> None:
        self._fd = -1
        if self._file:
            self._file.close()

    def _append(self, record: bytes) -> None:
        # Pipes and devices cannot be truncated after a partial write.
        regular = self._file is not None and self._file.regular
        size = os.fstat(self._fd).st_size if regular else 0
        try:
            write_all(self._fd, record)
        except OSError:
            if regular:
                # A partial record would make all later records unreadable.
                os.ftruncate(self._fd, size)
            raise

    def _continue_file(self, fd: int) -> None:
        """Ensure that the next append starts at a record boundary."""
        size = os.fstat(fd).st_size
        if self.form is Form.JSON:
            if size and os.pread(fd, 1, size - 1) != b"\n":
                os.write(fd, b"\n")
            return
        at = 0
        while at < size:
            at += LENGTH.size + int.from_bytes(os.pread(fd, LENGTH.size, at))
        if at != size:
            raise ExportError(
                f"{self._path} does not end with a complete message",
                hint="the file is truncated or in another format: move it, or choose another path",
            )

    def _prepare(self, more: int) -> None:
        """Recreate the file if it has been removed or moved.

        Rotate a file that is too large or too old.
        """
        file = self._file
        if file is None:
            return
        if not file.is_in_place():
            # The file is also missing after a rotation that failed to open the new file.
            self._open(stat.S_IMODE(os.fstat(file.fd).st_mode))
            return
        rotation = self._rotation if file.movable else None
        size = os.fstat(file.fd).st_size if rotation else 0
        if rotation is None or not size:
            return
        too_large = rotation.max_bytes and size + more > rotation.max_bytes
        too_old = rotation.max_age_s and self._now() - self._opened >= rotation.max_age_s
        if not too_large and not too_old:
            return
        file.move_to(_backup_name(file, self._now()))
        self._fd, self._opened = file.fd, self._now()
        try:
            _delete_backups(file, rotation, self._now())
        except OSError as error:
            _log.warning("%s: cannot delete an old file: %s", self.name, describe_error(error))


def _time_text(unix_s: float) -> str:
    moment = dt.datetime.fromtimestamp(unix_s, dt.UTC)
    return moment.strftime("%Y-%m-%dT%H-%M-%S.") + f"{moment.microsecond // 1000:03d}"


def _backup_name(file: AppendedFile, unix_s: float) -> str:
    stem, suffix = os.path.splitext(file.name)
    while file.sibling_exists(name := f"{stem}-{_time_text(unix_s)}{suffix}"):
        unix_s += 0.001
    return name


def _delete_backups(file: AppendedFile, rotation: Rotation, now: float) -> None:
    stem, suffix = os.path.splitext(file.name)
    # Names have a fixed length and contain the time, so sorting by name sorts by age.
    pattern_length = len(f"{stem}-{_time_text(now)}{suffix}")
    backups = sorted(
        entry
        for entry in file.list_directory()
        if entry.startswith(f"{stem}-") and entry.endswith(suffix) and len(entry) == pattern_length
    )
    dropped = backups[: -rotation.max_backups] if rotation.max_backups else []
    if 0 < rotation.max_backup_age_s < now:  # otherwise, no backup is old enough
        oldest = f"{stem}-{_time_text(now - rotation.max_backup_age_s)}{suffix}"
        dropped = [entry for entry in backups if entry in dropped or entry < oldest]
    for entry in dropped:
        file.unlink_sibling(entry)
